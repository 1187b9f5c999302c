"""Which inputs and hidden units matter (E4): effects with bands, Bayes factors, and posterior probabilities, for any network.

Three questions, from the weakest in assumptions to the strongest:

    inputs     how does E[y | x] change with each input? Posterior of the average derivative and of partial dependence.
    relevance  is the input needed at all? p(z_j = 1 | D) for indicators z in a spike-and-slab over inputs, by evidence.
    units      which hidden units are needed? Posterior of each unit's contribution to the function, in units of the noise.

`savage_dickey` is the Bayes factor of a linear coefficient from one fit, where that is valid.
"""

from aleator.explain.effects import Inputs, inputs
from aleator.explain.hidden import Units, units
from aleator.explain.needed import BayesFactor, Relevance, relevance, savage_dickey

__all__ = ["BayesFactor", "Inputs", "Relevance", "Units", "inputs", "relevance", "savage_dickey", "units"]
