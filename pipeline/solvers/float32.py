"""Matrix products in float32, whatever torch is allowed to round: what certificates are computed with.

Where its caller allows it (torch.set_float32_matmul_precision, torch.backends.fp32_precision, autocast), torch rounds
the factors of a float32 product to 8 or 11 bits. A KKT violation computed so may be wrong by a hundredth, and a code
would be called optimal that is not. Left out: the products of the solver on a CPU (onednn.py), which are float32
themselves.

Shapes: N rows, d inputs, K outputs.
"""

import torch


def may_round(device: torch.device) -> bool:
    """Whether torch may round the factors of a float32 product on this device, outside of autocast."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("bf16", "tf32")


def product(rows_Nd: torch.Tensor, weight_Kd: torch.Tensor) -> torch.Tensor:
    """rows @ weight.T of float32 tensors, in float32; in float64 where torch may round float32, which is seldom."""
    with torch.autocast(rows_Nd.device.type, enabled=False):
        if may_round(rows_Nd.device):
            return (rows_Nd.double() @ weight_Kd.double().T).float()
        return rows_Nd @ weight_Kd.T
