"""Scores and probabilities of the router, and their gradients written out, in eager PyTorch: the specification of the formulas.

T rows (tokens), E experts, K top-k, S the K experts that a row chose. x = logits in fp32 (fp64 for fp64 logits), eps = 1e-20.

    score a(x)    sigmoid: 1 / (1 + e^-x)          da/dx = a (1 - a)
                  sqrtsoftplus: sqrt(log(1 + e^x))  da/dx = sigmoid(x) / (2 a + eps)
    p on S        softmax: softmax over the chosen x, or (pre_softmax) softmax over all x, taken at S
                  others: a / (sum over S of a + eps) where K > 1 and normalize, else a
    scores        softmax over all x, or a / (sum over all E of a + eps), whatever K

Sources: DeepSeek-V3 (2024, arXiv 2412.19437, equations 12 to 16) for sigmoid scores and a bias that only selects; GShard
(Lepikhin et al., 2020) and Mixtral (Jiang et al., 2024) for the two softmaxes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from meta_kernels.router import EPS


class Scoring(NamedTuple):
    """How the logits of the chosen experts become probabilities."""

    score_function: str
    pre_softmax: bool
    normalize: bool
    scaling_factor: float | None

    def divides(self, topk: int) -> bool:
        """Whether scores are divided by their sum over the chosen experts. One score is not: the result would be 1."""
        return self.normalize and topk > 1


def activation(x: Tensor, score_function: str) -> Tensor:
    """The score a(x) of each logit by itself."""
    if score_function == "sigmoid":
        return x.sigmoid()
    softplus = torch.nn.functional.softplus(x)
    # Where e^x is below the smallest number, the derivative of the root is infinite, and 0 * inf would be the gradient.
    vanished = softplus == 0
    return torch.where(vanished, 0.0, torch.where(vanished, 1.0, softplus).sqrt())


def activation_grad(x: Tensor, a: Tensor, score_function: str) -> Tensor:
    """da/dx, where a = a(x)."""
    return a * (1 - a) if score_function == "sigmoid" else x.sigmoid() / (2 * a + EPS)


def selection_keys(x: Tensor, bias: Tensor | None, score_function: str) -> Tensor:
    """What experts are ranked by. A softmax keeps the order of the logits, and tells apart what it would round together."""
    if score_function == "softmax":
        return x
    a = activation(x, score_function)
    return a if bias is None else a + bias.detach().to(x.dtype)


# --- probabilities of the chosen experts ------------------------------------------------------------------------------------------


def chosen_probs(x: Tensor, chosen: Tensor, scoring: Scoring) -> Tensor:
    """[T, K]: the probability of each chosen expert, in the order of `chosen` (int64 [T, K], no -1)."""
    scale = 1.0 if scoring.scaling_factor is None else scoring.scaling_factor
    if scoring.pre_softmax:
        return scale * x.softmax(-1).gather(1, chosen)
    x = x.gather(1, chosen)
    if scoring.score_function == "softmax":
        return scale * x.softmax(-1)
    a = activation(x, scoring.score_function)
    return scale * (a / (a.sum(-1, keepdim=True) + EPS) if scoring.divides(a.shape[1]) else a)


def chosen_probs_grad(grad: Tensor, x: Tensor, chosen: Tensor, scoring: Scoring) -> Tensor:
    """[T, E]: the gradient of x, from that of the probabilities of the chosen experts, [T, K]."""
    g = grad if scoring.scaling_factor is None else scoring.scaling_factor * grad
    if scoring.pre_softmax:
        return _softmax_grad(torch.zeros_like(x).scatter(1, chosen, g), x)
    picked = x.gather(1, chosen)
    if scoring.score_function == "softmax":
        grad_picked = _softmax_grad(g, picked)
    else:
        grad_picked = _activation_grad(g, picked, scoring.score_function, scoring.divides(chosen.shape[1]))
    return torch.zeros_like(x).scatter(1, chosen, grad_picked)


# --- scores of all experts --------------------------------------------------------------------------------------------------------


def all_scores(x: Tensor, score_function: str) -> Tensor:
    """[T, E]: scores that sum to 1 over all experts, for the balancing loss."""
    if score_function == "softmax":
        return x.softmax(-1)
    a = activation(x, score_function)
    return a / (a.sum(-1, keepdim=True) + EPS)


def all_scores_grad(grad: Tensor, x: Tensor, score_function: str) -> Tensor:
    """[T, E]: the gradient of x, from that of all scores."""
    if score_function == "softmax":
        return _softmax_grad(grad, x)
    return _activation_grad(grad, x, score_function, divided=True)


def _softmax_grad(g: Tensor, x: Tensor) -> Tensor:
    p = x.softmax(-1)
    return p * (g - (p * g).sum(-1, keepdim=True))


def _activation_grad(g: Tensor, x: Tensor, score_function: str, divided: bool) -> Tensor:
    """The gradient of x, from that of a(x), or of a(x) divided by its sum over the last dimension."""
    a = activation(x, score_function)
    if divided:
        total = a.sum(-1, keepdim=True) + EPS
        # Divided twice: the square of a small total is no number of fp32.
        g = (g - (g * a).sum(-1, keepdim=True) / total) / total
    return g * activation_grad(x, a, score_function)
