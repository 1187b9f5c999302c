"""Models with hidden variables (deck 003): conjugate pairs, mixtures, sequences, topics, factors, autoencoders; one road for all of them."""

from aleator.latent import parts, posteriors, strings
from aleator.latent._annealed import Bounds, ais, sandwich
from aleator.latent._model import Conjugate, ConjugateLatent, Latent
from aleator.latent.adversarial import Generator, adversarial
from aleator.latent.autoregressive import Autoregressive
from aleator.latent.conditional import conditional
from aleator.latent.factor import Columns, FactorModel
from aleator.latent.few_shot import Pooled, episodes
from aleator.latent.hmm import HMM
from aleator.latent.lda import (
    LDA,
    Proportions,
    TopicChains,
    Topics,
    coherence,
    collapsed_gibbs,
    documents,
    halves,
    perplexity,
    top_words,
    topics_of,
)
from aleator.latent.linear_dynamics import Coefficients, Effects, Level, LinearDynamics, Seasonal, Structural, Trend, Variances
from aleator.latent.mixture import Mixture
from aleator.latent.pair import Pair
from aleator.latent.pixels import Levels, Symbols
from aleator.latent.questions import Components, components, log_prob, simulate
from aleator.latent.segment import FeatureMap, MapDecoder, MapEncoder, energy_distance, segmenter
from aleator.latent.strings import Strings
from aleator.latent.vae import VAE
from aleator.latent.weights import Dirichlet, Sticks

__all__ = [
    "Autoregressive",
    "Bounds",
    "Coefficients",
    "Columns",
    "Components",
    "Conjugate",
    "ConjugateLatent",
    "Dirichlet",
    "Effects",
    "FactorModel",
    "FeatureMap",
    "Generator",
    "HMM",
    "LDA",
    "Latent",
    "Level",
    "Levels",
    "LinearDynamics",
    "MapDecoder",
    "MapEncoder",
    "Mixture",
    "Pair",
    "Pooled",
    "Proportions",
    "Seasonal",
    "Sticks",
    "Strings",
    "Structural",
    "Symbols",
    "TopicChains",
    "Topics",
    "Trend",
    "VAE",
    "Variances",
    "adversarial",
    "ais",
    "coherence",
    "collapsed_gibbs",
    "components",
    "conditional",
    "documents",
    "energy_distance",
    "episodes",
    "halves",
    "log_prob",
    "parts",
    "perplexity",
    "posteriors",
    "sandwich",
    "segmenter",
    "simulate",
    "strings",
    "top_words",
    "topics_of",
]
