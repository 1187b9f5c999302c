"""Latent Dirichlet allocation: documents are mixtures of topics, topics are distributions over words."""

from aleator.latent.lda.corpus import check_documents, documents
from aleator.latent.lda.families import Proportions, Topics
from aleator.latent.lda.gibbs import TopicChains, collapsed_gibbs
from aleator.latent.lda.judging import coherence, halves, perplexity, top_words, topics_of
from aleator.latent.lda.model import LDA

__all__ = [
    "LDA",
    "Proportions",
    "TopicChains",
    "Topics",
    "check_documents",
    "coherence",
    "collapsed_gibbs",
    "documents",
    "halves",
    "perplexity",
    "top_words",
    "topics_of",
]
