"""The text of --help: all commands, or the flags of one command in groups, each with its current default.

`mlsm COMMAND --help` only names the advanced flags, to stay short; `mlsm help COMMAND` also describes them. A flag's
description is the docstring under its setting. Not handled here: reading flags (flags.py).
"""

import argparse
import ast
import dataclasses
import difflib
import inspect
import shutil
import textwrap
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from mlsm.cli.flags import Parser, add_flag, takes_several
from mlsm.commands import STAGES, Command
from mlsm.common.invocation import program
from mlsm.common.settings import flag_of, is_word, settable
from mlsm.common.text import words_of

COMMON = """\
  --json               print the result as JSON
  --print-config       print the settings as YAML and stop
  --debug              show the whole traceback of an error"""
RECIPES = "  --recipe NAME|FILE   defaults from recipes/NAME.yaml or a YAML file; flags override them"

# The groups of settings of all commands, common settings first. Settings that are not listed here are shown under
# options, in the order of their class. A setting means the same in all commands. --help only names the advanced ones.
GROUPS = {
    "input": """page dataset from_ file model images run path results stores store models recipe corpus teacher
        tokenizer hidden dictionary student continue_from text word lsp texts_a texts_b sentences pairs vectors
        similar_to document window against tasks push_to_hub""",
    "options": """objective probe_input encoder layer k lam top_n quantise bytes packing max_length max_tokens
        dictionary_tokens epochs max_steps batch_windows micro_batch lr mask_rate checkpoints frozen seeds batch split
        step metric limit_train per_paradigm seed device dtype workers""",
    "paths": "output run_dir data_dir diagnostic html wordnet codebook",
    "advanced": """text_field document_boundary invalid_utf8 min_characters keep_duplicates held_out_by documents_apart
        segments unit_tokens batch_tokens scheduler products compile activation_checkpointing retry_quarantine atoms
        center dictionary_epochs solver tolerance solver_steps solver_backend store_weights kappa regress_loss
        target_temperature untied continue_head optimizer warmup schedule decay_share adam_beta1 adam_beta2 weight_decay
        decay_all grad_clip dropout positions mask_rate_end mask_schedule mask_rate_steps mask_weights mask_weight_steps
        mask_update_steps mask_unit corruption mask_later short_windows short_share save_every keep_last eval_every
        eval_windows overwrite""",
}
FEW = 4  # if there are at most this many advanced flags, they are described too
TITLES = {"input": "Input and output", "options": "Options", "paths": "Paths", "advanced": "Advanced"}


def greeting() -> str:
    """Tell a user who typed only the program's name how to start."""
    mlsm = program()
    return (
        f"Masked Latent Semantic Modeling: encode a corpus once, pre-train encoders from it many times.\n\n"
        f"To try it in minutes, with all that comes with the package:\n"
        f"  {mlsm} encode-lsp && {mlsm} train-student\n\n"
        f"To pre-train on a corpus of your own (first how long it will take here):\n"
        f"  {mlsm} encode-lsp --corpus 'wiki/*.txt' --teacher bert-base-cased --layer 10 --dry-run\n\n"
        f"To compare pre-training objectives, from the corpus to a page of results:\n"
        f"  {mlsm} study --recipe study-demo --dry-run\n\n"
        f"What this machine can do: {mlsm} doctor. All commands: {mlsm} help"
    )


def overview(commands: dict[str, Command]) -> str:
    """List all commands, for `mlsm --help`."""
    first = [name for name in commands if name in STAGES]
    others = [name for name in commands if name not in STAGES]
    groups = [first, [name for name in others if commands[name].recipes]]
    groups.append([name for name in others if not commands[name].recipes])
    width = max(60, shutil.get_terminal_size().columns - 1)
    lists = ["\n".join(_row(name, commands[name].summary, width) for name in group) for group in groups]
    return (
        "usage: mlsm COMMAND [FLAGS]      (or: python cli.py COMMAND [FLAGS])\n\n"
        "Masked Latent Semantic Modeling: encode a corpus once, train from it many times.\n\n"
        + "".join(f"{listed}\n\n" for listed in lists)
        + (
            f"Every command has --help (everything: mlsm help COMMAND), and:\n{COMMON}\n\nThe commands of the first "
            f"two groups also have:\n{RECIPES}\n\nRunning a command again resumes it, or says that it is finished."
        )
    )


def _row(name, summary, width):
    """A line of a list, wrapped under its second column."""
    return textwrap.fill(f"  {name:<18} {summary}", width, subsequent_indent=" " * 21, break_on_hyphens=False)


def unknown_command(name: str, names: Iterable[str]) -> str:
    """Say that a command does not exist, and which one may have been meant."""
    meant = difflib.get_close_matches(name.replace("_", "-"), names, n=1)
    did_you_mean = f" Did you mean {meant[0]}?" if meant else ""
    return f"no command {name!r}.{did_you_mean} There are: {', '.join(names)}"


def flags_of(command: Command, values: dict, why: str, brief: bool = False) -> Parser:
    """Describe one command and its flags, for `mlsm COMMAND --help` and for the command's page of the site.

    values   the recipe's values, by setting;  why  the recipe and the reason why it applies, or ""
    brief    whether the advanced flags are only named
    Returns  a parser with the flags in groups, whose format_help() is the text
    """
    settings_class = command.settings
    fields = settable(settings_class)
    docs = _docs(settings_class)
    words = " ".join(
        f"[{field.name.upper()}{' ...' if takes_several(field) else ''}]" for field in fields.values() if is_word(field)
    )
    named = f"Defaults marked {_recipe_in(why)} come from the {why}; all others are the general defaults."
    defaults = f"\n\n{named}" if why else ""
    _, _, more = (settings_class.__doc__ or "").partition("\n\n")  # the first paragraph repeats the summary
    details = f"\n\n{' '.join(more.split())}" if more.strip() else ""
    parser = Parser(
        usage=" ".join(filter(None, [program(), command.name, words, "[FLAGS]"])),
        description=f"{command.summary}{details}{defaults}",
        epilog=f"Common options:\n{RECIPES + chr(10) if command.recipes else ''}{COMMON}",
        formatter_class=_Format,
    )
    for group, names in _grouped(fields).items():
        if brief and group == "advanced" and len(names) > FEW:
            flags = " ".join(flag_of(fields[setting]) for setting in names)
            listed = textwrap.fill(flags, 96, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
            parser.add_argument_group(f"{TITLES[group]} ({program()} help {command.name} describes them)", listed)
            continue
        shown = parser.add_argument_group(TITLES[group])
        for setting in names:
            choices = [f"`{name}` {text}" for name, text in fields[setting].metadata.get("choices", {}).items()]
            text = f"{docs.get(setting, '')} {', '.join(choices)} {_default(fields[setting], values, why)}"
            text = " ".join(text.split())
            add_flag(shown, fields[setting], help=text.replace("%", "%%"))
    return parser


def _grouped(fields):
    """Lists of the settings of a command, by group."""
    groups = {group: [name for name in names.split() if name in fields] for group, names in GROUPS.items()}
    named = {name for names in groups.values() for name in names}
    for name, field in fields.items():
        if name not in named:
            groups["input" if is_word(field) else "options"].append(name)
    return groups


class _Format(argparse.HelpFormatter):
    """A formatter that keeps the lines of indented lists and wraps everything else."""

    def __init__(self, prog):
        super().__init__(prog, max_help_position=28)

    def _split_lines(self, text, width):
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text, width, indent):
        return "\n".join(line if line.startswith("  ") else textwrap.fill(line, width) for line in text.splitlines())


def _default(field, values, why):
    """Write the default of a setting, shown after its description; empty if the setting has none.

    If it comes from a recipe, the recipe is named, and the general default is added: (quickstart: 1024; in general:
    3072).
    """
    general = _plain(None if field.default is dataclasses.MISSING else field.default)
    if field.name in values and (here := _plain(values[field.name])) != general:
        return f"({_recipe_in(why)}: {here}{f'; in general: {general}' if general else ''})"
    return f"(default: {general})" if general else ""


def _recipe_in(why):
    """The name in `recipe paper, that of the store`."""
    return why.removeprefix("recipe ").partition(" ")[0].rstrip(",")


def _plain(value):
    """Write a default as it would be passed to the flag; empty for a setting without a default."""
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return ("off", "on")[value]
    return words_of(value)


def _docs(settings_class):
    """Collect the docstrings under the fields of a settings class and of its bases, by field."""
    docs = {}
    bases: list[Any] = [base for base in reversed(settings_class.__mro__) if dataclasses.is_dataclass(base)]
    for base in bases:
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except OSError:  # installed without sources
            continue
        definition = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
        for statement, following in pairwise(definition.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=text):
                    docs[name] = " ".join(str(ast.literal_eval(text)).split())
    return docs
