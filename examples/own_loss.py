"""A loss of your own: plain REINFORCE that holds on to what the model is sure of.

    onbeat train recipes/arithmetic.toml --algorithm.loss examples/own_loss.py:careful

Written in the methods of the tensors it is given, per completion token; onbeat sums, weighs and divides.
"""

from onbeat.algorithms.base import TokenLoss, Tokens


def careful(tokens: Tokens) -> TokenLoss:
    unsure_T = 1.0 - tokens.policy_logprobs_T.detach().exp()
    loss_T = -tokens.advantage_T * unsure_T * tokens.policy_logprobs_T
    return TokenLoss(loss_T, clipped_T=unsure_T < 0.01)
