"""The flags of a command line, as values by setting.

    read_flags(EncodeConfig, ["--layer", "4", "8", "--lam=0.1"])    # {"layer": (4, 8), "lam": 0.1}

Argparse finds the words of each flag. The setting's type annotation says which values are valid, as it does for YAML
and Python (mlsm/common/settings.py). The result has only the flags that the user passed, so a recipe's values apply to
all others. For an unknown flag, the error suggests the one that was probably meant: it corrects typing errors and knows
the names that transformers and others use. Recipes are handled in settings.py, the text of --help in help.py.
"""

import argparse
import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from mlsm.common.settings import convert_field, flag_of, is_word, plain_hint, settable

# Names that transformers, sentence-transformers and others use for our settings. If a command has several of the
# settings, the first one is suggested. A second word is the value of our setting that equals their switch.
OTHER_NAMES = {
    "learning_rate": ["lr"],
    "peak_lr": ["lr"],
    "batch_size": ["batch_windows", "batch"],
    "train_batch_size": ["batch_windows", "batch"],
    "per_device_train_batch_size": ["micro_batch", "batch"],
    "per_device_eval_batch_size": ["batch_tokens", "eval_windows"],
    "gradient_accumulation_steps": ["batch_windows"],
    "num_train_epochs": ["epochs"],
    "num_epochs": ["epochs"],
    "steps": ["max_steps"],
    "num_steps": ["max_steps"],
    "warmup_ratio": ["warmup"],
    "warmup_steps": ["warmup"],
    "lr_scheduler_type": ["schedule"],
    "optim": ["optimizer"],
    "max_grad_norm": ["grad_clip"],
    "mlm_probability": ["mask_rate"],
    "masking_rate": ["mask_rate"],
    "max_seq_length": ["max_length"],
    "sequence_length": ["max_length"],
    "model": ["encoder", "teacher", "models"],
    "student_model": ["encoder"],
    "model_name_or_path": ["encoder", "teacher", "models"],
    "tokenizer_name": ["tokenizer"],
    "resume_from_checkpoint": ["continue_from"],
    "output_dir": ["output", "run_dir"],
    "output": ["run_dir"],
    "data": ["corpus", "store"],
    "dataset": ["corpus", "store"],
    "dataset_name": ["corpus", "store"],
    "train_file": ["corpus"],
    "lambda": ["lam"],
    "alpha": ["lam", "power"],
    "n_components": ["k"],
    "tol": ["tolerance"],
    "fp16": ["dtype"],
    "bf16": ["dtype bfloat16"],
    "torch_dtype": ["dtype"],
    "save_steps": ["save_every"],
    "eval_steps": ["eval_every"],
    "save_total_limit": ["keep_last"],
    "report_to": ["track"],
    "gradient_checkpointing": ["activation_checkpointing"],
    "torch_compile": ["compile"],
    "dataloader_num_workers": ["workers"],
    "num_proc": ["workers"],
    "num_workers": ["workers"],
    "config": ["recipe"],
}


MAY_BE_EMPTY = {"checkpoints"}  # flags of lists where no value means none; elsewhere it is an empty $VARIABLE


def read_flags(settings_class: type, argv: list[str], common: Collection[str] = ()) -> dict:
    """Read the values of the settings that a command line names.

    common  names of the command's other flags, which an unknown one may mean: recipe, print_config
    Raises  ValueError of one sentence: an unknown flag, a flag that is given twice or without its value, or a value of
            the wrong kind
    """
    fields = settable(settings_class)
    parser = Parser()
    for field in fields.values():
        add_flag(parser, field)
    spelt = {_with_hyphens(word): word for word in argv}
    _refuse_twice([_with_hyphens(word) for word in argv], fields)
    found, others = parser.parse_known_intermixed_args([_with_hyphens(word) for word in argv])
    if others:
        flags = [word for word in others if word.startswith("-")]
        if not flags:
            raise ValueError(f"unexpected word {others[0]!r}.")
        unknown = spelt[flags[0]].partition("=")[0]
        meant = meant_by(unknown.lstrip("-"), [*fields, *common])
        if meant is not None and meant in common and meant == unknown.lstrip("-").replace("-", "_"):
            raise ValueError(f"{unknown} is a switch and takes no value.")
        hint = f" Did you mean --{meant.replace('_', '-')}?" if meant else ""
        if meant in fields and is_word(fields[meant]):
            hint = f" Write {meant.upper()} directly after the command, without a flag."
        raise ValueError(f"there is no flag {unknown}.{hint}")
    return {name: _value(fields[name], words) for name, words in vars(found).items()}


def _refuse_twice(argv, fields):
    """Refuse a flag that is given twice, because argparse would silently use the last one."""
    flags = [word.partition("=")[0] for word in argv if word.startswith("--")]
    for field in fields.values():
        name = flag_of(field)
        if flags.count(name) + flags.count(name.replace("--", "--no-", 1)) > 1:
            together = f" Write all its values after one {name}: {name} A B." if takes_several(field) else ""
            raise ValueError(f"{name} is given twice.{together}")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError for the user's mistakes, and that has no flags of its own."""

    def __init__(self, **settings: Any):
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError that says what the user did wrong."""
        if lacking := re.fullmatch(r"argument (--[\w-]+).*: expected one argument", message):
            raise ValueError(f"{lacking[1]} needs a value.")
        if switch := re.fullmatch(r"argument (--[\w-]+).*: ignored explicit argument (.*)", message):
            raise ValueError(f"{switch[1]} is a switch and takes no value, found {switch[2]}.")
        raise ValueError(f"{message.removeprefix('argument ')}.")


def takes_several(field: dataclasses.Field) -> bool:
    """Whether a setting takes several words."""
    hint = plain_hint(field.type)
    return any(get_origin(kind) is tuple for kind in (hint, *get_args(hint)))


def add_flag(parser: argparse._ActionsContainer, field: dataclasses.Field, **more: Any) -> None:
    """Add a setting's flag to a parser or to a group of its flags. `more` is passed to argparse's add_argument."""
    hint, several = plain_hint(field.type), "*" if takes_several(field) else None
    if is_word(field):
        parser.add_argument(field.name, nargs=several or "?", metavar=field.name.upper(), **more)
    elif hint is bool or get_args(hint) == (bool, type(None)):
        parser.add_argument(flag_of(field), dest=field.name, action=argparse.BooleanOptionalAction, **more)
    else:
        parser.add_argument(flag_of(field), dest=field.name, nargs=several, metavar=_placeholder(hint), **more)


def _placeholder(hint):
    """Write the placeholder of a flag's value, as --help shows it: N, {token,word,span}, PATH."""
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return choices[0] if len(choices) == 1 else f"{{{','.join(choices)}}}"
    kinds = [kind for kind in get_args(hint) if kind not in (type(None), Ellipsis)]
    if kinds:
        return "|".join(dict.fromkeys(map(_placeholder, kinds)))
    return {int: "N", float: "NUMBER", Path: "PATH"}.get(hint, "TEXT")


def _value(field, words):
    """Convert the words of a flag to a value. A single word may become a list of one; an unset setting is None."""
    if words == [] and field.name not in MAY_BE_EMPTY:
        raise ValueError(f"{flag_of(field)} needs a value.")
    if isinstance(words, list) and len(words) == 1:
        (words,) = words
    if words == "None" and type(None) in get_args(plain_hint(field.type)):
        return None
    return convert_field(field, words, text=True)


def _with_hyphens(word):
    """Spell --learning_rate=1e-3 as --learning-rate=1e-3."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if word.startswith("--") else word


def meant_by(name: str, fields: Iterable[str]) -> str | None:
    """Guess which setting an unknown name means, perhaps with its value: `lr`, `dtype bfloat16`; None if there is no
    guess.

    fields  names of the settings that there are
    """
    name = name.replace("-", "_")
    known = [meant for meant in OTHER_NAMES.get(name, ()) if meant.split()[0] in fields]
    known = known or difflib.get_close_matches(name, fields, n=1) or [one for one in fields if one.startswith(name)]
    return known[0] if known else None


def take_flag(argv: list[str], flag: str) -> bool:
    """Say whether a flag is given, and remove it from the command line."""
    found = flag in argv
    while flag in argv:
        argv.remove(flag)
    return found


def take_value(argv: list[str], flag: str) -> str | None:
    """Return the value of a flag, None if it is not given, and remove both from the command line."""
    if sum(arg.partition("=")[0] == flag for arg in argv) > 1:
        raise ValueError(f"{flag} is given twice.")
    for i, arg in enumerate(argv):
        if arg == flag:
            if i + 1 == len(argv):
                raise ValueError(f"{flag} needs a value.")
            value = argv[i + 1]
            del argv[i : i + 2]
        elif arg.startswith(flag + "="):
            value = arg.split("=", 1)[1]
            del argv[i]
        else:
            continue
        if not value:
            raise ValueError(f"{flag} needs a value, found an empty one, as of a shell variable that is not set.")
        return value
    return None
