"""Models with hidden variables (deck 003): conjugate pairs, mixtures, sequences, topics, factors, autoencoders; one road for all of them."""

from aleator.latent import parts, posteriors
from aleator.latent._model import Conjugate, ConjugateLatent, Latent
from aleator.latent.autoregressive import Autoregressive
from aleator.latent.factor import Columns, FactorModel
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
from aleator.latent.vae import VAE
from aleator.latent.weights import Dirichlet, Sticks

__all__ = [
    "Autoregressive",
    "Coefficients",
    "Columns",
    "Components",
    "Conjugate",
    "ConjugateLatent",
    "Dirichlet",
    "Effects",
    "FactorModel",
    "HMM",
    "LDA",
    "Latent",
    "Level",
    "Levels",
    "LinearDynamics",
    "Mixture",
    "Pair",
    "Proportions",
    "Seasonal",
    "Sticks",
    "Structural",
    "Symbols",
    "TopicChains",
    "Topics",
    "Trend",
    "VAE",
    "Variances",
    "coherence",
    "collapsed_gibbs",
    "components",
    "documents",
    "halves",
    "log_prob",
    "parts",
    "perplexity",
    "posteriors",
    "simulate",
    "top_words",
    "topics_of",
]
