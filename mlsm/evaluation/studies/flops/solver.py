"""Operations of sparse coding and of learning the dictionary.

Not handled here: the teacher's pass that makes the vectors (pretraining.py), comparisons, and time. The coordinate
updates are a fifth of the operations at k = 3072, d = 768, but they use short vectors and run far slower than matrix
products.

Shapes: d hidden width, k atoms.
"""

from pipeline.config import minibatch_size

FISTA_STEPS = 100  # in the official code
# By `python -m benchmarks.solver_operations`: layer 5 of MiniLM (d = 384), k = 3072, lam = 0.05, a KKT violation of
# 1e-3. Both numbers are per token and depend on the vectors.
UPDATED_ROWS = 144  # rows of the Gram matrix subtracted from all k correlations
INNER_OPERATIONS = 328_000  # coordinate descent and conjugate gradients on the working set, and the certificate


def fista_flops(tokens: float, k: int, d: int, steps: int = FISTA_STEPS) -> float:
    """Steps of FISTA, each a product with the k x d dictionary and one with its transpose."""
    return steps * 2 * 2 * k * d * tokens


def correlation_flops(tokens: float, k: int, d: int) -> float:
    """The exact part of our solver: every token's correlation with every atom."""
    return 2 * k * d * tokens


def update_flops(tokens: float, k: int) -> float:
    """The part that depends on the data, as measured on MiniLM's hidden states."""
    return (2 * k * UPDATED_ROWS + INNER_OPERATIONS) * tokens


def solver_flops(tokens: float, k: int, d: int) -> float:
    """Operations of our solver: coordinate descent on a working set until its certificate holds."""
    return correlation_flops(tokens, k, d) + update_flops(tokens, k)


def learning_flops(vectors: int, epochs: float, k: int, d: int) -> float:
    """Online dictionary learning from vectors that are already computed.

    Every vector is coded. Every minibatch takes one pass over the atoms (2 k^2 d, Mairal et al. 2009, algorithm 2) and
    half of a new Gram matrix (k^2 d). Not counted: evaluations, and sums over the codes' non-zeros (1 % of coding).
    """
    return epochs * (solver_flops(vectors, k, d) + vectors / minibatch_size(vectors) * 3 * k * k * d)
