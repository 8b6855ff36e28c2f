"""An MLSM student for use: text or token ids to distributions over latent semantic properties (LSPs).

    model = LspModel.from_pretrained("runs/students/<run>")     # or an export, a kept checkpoint, a Hub id
    for lsps in model.lsp(["The bank raised its rates."]):
        lsps.tokens, lsps.distributions_Tk, lsps.top(5)

An export contains, in addition to the encoder:

    lsp_head.safetensors   dense.*, norm.*: the prediction head; output.weight (k, d), output.bias (k)
    lsp_config.json        lsps, max_length, special_ids, positions (which tokens were predicted in training), and the
                           store whose dictionary numbers the LSPs

and lsp_head_2.safetensors, lsp_config_2.json, ... for the second and later stores, if the student learned from several.
Each file holds a whole head; they all have the same dense and norm.

Not handled here: training (train.py), what the LSPs mean (stage A makes the dictionary).

Shapes: W windows, L positions, M chosen positions, T tokens of a text without special ones, d hidden width, k LSPs.
"""

import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from mlsm.common.disk import read_file
from mlsm.common.errors import RunError, describe
from mlsm.common.invocation import program
from mlsm.common.json_checks import Count, find_problem, object_of, one_of, optional, within
from mlsm.common.model_checks import (
    catch_panics,
    describe_special_tokens,
    describe_unfit_tokenizer,
    load_tensors,
    max_positions,
    open_config,
    open_tokenizer,
    token_types,
)
from shards.manifest import MAX_WIDTH
from shards.reader import Store
from student.encoders.build import load_weights
from student.encoders.model import Student
from student.encoders.modeling_mlsm import head_files
from student.runs.probed import export_of

FACTS = object_of(  # lsp_config.json, as far as it is read
    {
        "lsps": within(1, MAX_WIDTH),
        "max_length": within(3, 65_535),
        "special_ids": object_of(dict.fromkeys(("pad", "cls", "sep", "mask"), Count)),
        "positions": one_of("masked", "all"),
        "dictionary": optional(str | None),
        "store": optional(str | None),
    }
)


_COMPUTING = threading.Lock()
"""Calls from several threads run one after the other: meanwhile the encoder holds the positions to predict."""
os.register_at_fork(after_in_child=_COMPUTING._at_fork_reinit)  # type: ignore[attr-defined]  # else a child may wait


class TextLsps(NamedTuple):
    """The LSPs of one text."""

    tokens: list[str]
    """the text's tokens, without special ones"""
    distributions_Tk: Tensor
    """float32; every row sums to one"""

    def top(self, count: int = 5) -> list[list[tuple[int, float]]]:
        """The most probable LSPs of every token with their probabilities, the largest first. Raises ValueError if count
        is negative."""
        if count < 0:
            raise ValueError(f"count must be at least 0, found {count}")
        weights, lsps = self.distributions_Tk.topk(min(count, self.distributions_Tk.shape[1]))
        return [list(zip(*row, strict=True)) for row in zip(lsps.tolist(), weights.tolist(), strict=True)]


def at_all_positions(
    student: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
) -> Tensor:
    """Outputs (W, L, K) of a Student or ProbedStudent. Token types are left out if its encoder does not have two."""
    everywhere = torch.arange(input_ids.numel(), device=input_ids.device)
    segments = token_type_ids if token_types(student.encoder.config) >= 2 else None
    with _COMPUTING:
        found = student(input_ids, attention_mask, everywhere, most_masked=input_ids.shape[1], segments_WL=segments)
        return found.view(*input_ids.shape, -1)


class LspModel(nn.Module):
    """Encoder, head and LSP output of a trained student, in evaluation mode.

    student  a Student with K = k: its outputs are the LSPs
    facts    what lsp_config.json holds
    """

    def __init__(self, student: Student, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]):
        super().__init__()
        self.student, self.tokenizer, self.facts = student, tokenizer, facts
        self.eval()

    @classmethod
    def from_pretrained(cls, source: str | PathLike[str], revision: str | None = None, head: int = 1) -> "LspModel":
        """Load the export of a student with LSP outputs.

        source    a finished run's directory, an export, a kept checkpoint, or a Hub id
        revision  branch or commit of a Hub id, such as step-00010000
        head      of a student of several stores: the store whose LSPs are predicted, counted from 1
        Raises    RunError if there are no such LSP outputs, or the files are damaged
        """
        source = export_of(fspath(source))
        student, facts = load_student(source, revision, head)
        return cls(student, load_tokenizer(source, student, revision), facts)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Logits (W, L, k) of all positions; their softmax is the predicted distribution. It takes what a tokenizer
        returns.

        The student was trained at positions that hold the mask token, to predict the LSPs of the token that was there;
        with --positions all, at every position of unmasked text.
        """
        return at_all_positions(self.student, input_ids, attention_mask, token_type_ids)

    @torch.no_grad()
    def lsp(
        self, texts: str | Iterable[str], *, masking: Literal["each", "none"] | None = None, batch_windows: int = 32
    ) -> list[TextLsps]:
        """The LSP distribution of every token of some texts.

        texts    strings; each must fit into one window of the student
        masking  each: every token is masked in turn, so that its distribution is what the context says about it; costs
                 a window per token
                 none: the texts are read as they are, in one window each, and the encoder sees the token itself. A
                 mask token in the text is predicted
                 None: as the student was trained, `none` with --positions all, else `each`
        Raises   ValueError if a text is too long, or batch_windows is below 1
        """
        if batch_windows < 1:
            raise ValueError(f"batch_windows must be at least 1, found {batch_windows}")
        if masking is None:
            masking = "none" if self.facts["positions"] == "all" else "each"
        framed = [self._frame(text) for text in ([texts] if isinstance(texts, str) else texts)]
        rows = [row for ids in framed for row in self._rows(ids, masking)]
        batches = [rows[start : start + batch_windows] for start in range(0, len(rows), batch_windows)]
        found = torch.cat([torch.empty(0, self.facts["lsps"], dtype=torch.float32), *map(self._distributions, batches)])
        parts = found.split([len(ids) - 2 for ids in framed])
        return [
            TextLsps(self.tokenizer.convert_ids_to_tokens(ids[1:-1]), part)
            for ids, part in zip(framed, parts, strict=True)
        ]

    def _frame(self, text: str) -> list[int]:
        special, room = self.facts["special_ids"], self.facts["max_length"]
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) + 2 > room:
            raise ValueError(
                f"a text of {len(ids)} tokens ({text[:30]!r}...): this student reads at most {room - 2}. Cut it."
            )
        return [special["cls"], *ids, special["sep"]]

    def _rows(self, ids: list[int], masking: str) -> list[tuple[list[int], list[int]]]:
        """Inputs of a text, each with the positions to predict."""
        positions = list(range(1, len(ids) - 1))
        if masking == "none":
            return [(ids, positions)]
        if masking != "each":
            raise ValueError(f"masking is each or none, found {masking}")
        mask = self.facts["special_ids"]["mask"]
        return [([*ids[:position], mask, *ids[position + 1 :]], [position]) for position in positions]

    def _distributions(self, rows):
        """float32 (M, k) on the CPU, in the order of the rows."""
        width = max(len(ids) for ids, _ in rows)
        pad = self.facts["special_ids"]["pad"]
        input_WL = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows])
        attention_WL = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
        where_M = torch.tensor([row * width + p for row, (_, places) in enumerate(rows) for p in places], dtype=int)
        device = self.student.output_bias_K.device
        with _COMPUTING:
            logits_Mk = self.student(input_WL.to(device), attention_WL.to(device), where_M.to(device))
        return logits_Mk.float().softmax(dim=1).cpu()


def save_lsp_head(student: Student, columns: slice, facts: dict, directory: Path, head: int = 1) -> None:
    """Write head and LSP outputs of a student into its export.

    columns  which of its outputs are the LSPs
    facts    the other entries of lsp_config.json
    head     the number of their store, from 1
    """
    head_file, config_file = head_files(head)
    tensors = dict(student.head.state_dict())
    tensors |= {"output.weight": student.output_matrix[columns], "output.bias": student.output_bias_K[columns]}
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, directory / head_file)
    facts = facts | {"lsps": len(tensors["output.bias"])}
    (directory / config_file).write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n")


def lsp_facts(store: Store, positions: str) -> dict:
    """The facts in lsp_config.json about the store that a student learned its LSPs from, at `positions`."""
    return {
        "positions": positions,
        "max_length": store.max_length,
        "special_ids": {name: int(store.special_ids[name]) for name in ("pad", "cls", "sep", "mask")},
        "dictionary": store.settings.get("dictionary"),
        "store": store.target_id,
    }


def load_student(source: str | Path, revision: str | None = None, head: int = 1) -> tuple[Student, dict]:
    """The student of an export with the LSPs of one store as its outputs, float32, on the CPU, and its lsp_config.json.

    Raises RunError if there are no LSP outputs, or the files are damaged
    """
    head_file, config_file = head_files(head)
    if (Path(source) / head_files(1)[0]).is_file() and not (Path(source) / head_file).is_file():
        raise RunError(f"{source} has no {head_file}: `head` counts the stores that the student learned from, from 1.")
    with explain_damaged_export(source):
        tensors = load_tensors(find_file(source, head_file, revision))
        facts = json.loads(read_file(find_file(source, config_file, revision)))
        if problem := find_problem(facts, FACTS):
            raise RunError(f"{source}/{config_file}: {problem}. {_export_again()}")
        if len(tensors["output.bias"]) != facts["lsps"]:
            raise RunError(
                f"{source}/{head_file}: {len(tensors['output.bias'])} outputs, expected {facts['lsps']} as"
                f" {config_file} says. {_export_again()}"
            )
        encoder = load_encoder(source, revision)
        if max(facts["special_ids"][name] for name in ("pad", "cls", "sep", "mask")) >= encoder.config.vocab_size:
            raise RunError(
                f"{source}/{config_file}: field special_ids: expected ids below the vocabulary of"
                f" {encoder.config.vocab_size}. {_export_again()}"
            )
        if facts["max_length"] > (room := max_positions(encoder)):
            raise RunError(
                f"{source}/{config_file}: field max_length: expected at most {room}, as many tokens as the encoder"
                f" reads, found {facts['max_length']}. {_export_again()}"
            )
        student = Student(encoder, facts["lsps"], tied=False, seed=0)
        names = {"output.weight": "output_Kd", "output.bias": "output_bias_K"}
        loaded = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
        loaded |= {names.get(name, f"head.{name}"): tensor for name, tensor in tensors.items()}
        student.load_state_dict(loaded, strict=True)
    return student.eval(), facts


def _export_again():
    return f"Export it again ({program()} export-student), or download it again."


@contextmanager
def explain_damaged_export(source: str | Path) -> Iterator[None]:
    """Turn the errors of the libraries that read an export's files into a RunError that names the export."""
    try:
        with catch_panics():
            yield
    except RunError:
        raise
    except Exception as error:  # the libraries raise many classes of errors
        if closed := [path for path in Path(source).glob("*") if path.exists() and not os.access(path, os.R_OK)]:
            raise RunError(
                f"{source} cannot be loaded: its {min(closed).name} may not be read by this user. Ask its owner to"
                f" allow that (chmod a+r)."
            ) from error
        raise RunError(
            f"{source} cannot be loaded: one of its files is damaged, or its files do not belong together "
            f"({describe(error)}). {_export_again()}"
        ) from error


def load_tokenizer(source: str | Path, student: Student, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of an export.

    Raises RunError if it is damaged, gives ids that the student's encoder does not know, or gives two tokens one id
    """
    with explain_damaged_export(source):
        tokenizer = open_tokenizer(source, revision=revision)
    if trouble := describe_unfit_tokenizer(tokenizer, student.encoder) or describe_special_tokens(tokenizer):
        raise RunError(f"{source}: {trouble} {_export_again()}")
    return tokenizer


def load_encoder(source: str | Path, revision: str | None = None) -> nn.Module:
    """The encoder of an export without a pooler, float32. Code and pickles in the export are not run."""
    hf_config = open_config(source, revision=revision)
    encoder, report = load_weights(source, hf_config, revision)
    if missing := sorted(report["missing_keys"]):  # transformers would initialise them at random
        raise RunError(
            f"{source}: model.safetensors lacks weights of the encoder: {', '.join(missing[:3])}. {_export_again()}"
        )
    return encoder


def find_file(source: str | Path, name: str, revision: str | None = None) -> str:
    """Path of a file of an export, fetched from the Hub if need be; RunError if it is not there."""
    try:
        return cached_file(source, name, revision=revision)
    except OSError:
        if not Path(source).is_dir():
            raise RunError(
                f"{source} is not a directory, and not a repository with {name} on the Hub that can be reached. "
                "Expected the export of a student with LSP outputs: a finished run, its export, a kept checkpoint or "
                "a Hub id."
            ) from None
        raise RunError(
            f"{source} has no {name}, so it has no LSP outputs: students of words or hidden states have none. Expected "
            "a student with LSP outputs: a finished run, its export, a kept checkpoint or a Hub id. Export any other "
            "checkpoint of a run:  "
            f"{program()} export-student RUN; one that Trainer saved: "
            "LspForPreTraining.from_pretrained(CHECKPOINT).export(DIRECTORY)"
        ) from None
