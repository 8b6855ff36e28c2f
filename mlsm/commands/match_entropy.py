"""Find the temperature, and the penalty, at which a store's targets are as flat as another's."""

from mlsm.commands._newest import lsp_stores
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_join
from mlsm.evaluation.studies.targets.config import MatchEntropyConfig as Settings
from mlsm.results import Report
from mlsm.terminal.tables import table

_NAMES = {"temperature": "--target-temperature", "lam": "--lam"}
_COMMANDS = {"temperature": "train-student on this store", "lam": "encode-lsp, see below"}

newest = lsp_stores


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Find the temperature, and the penalty, at which a store's targets are as flat as another's."""
    from mlsm.evaluation.studies.targets.entropy import match_entropy

    return Report.of(match_entropy(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show the entropies, and the settings that reach the requested one."""
    of = f", of {result['against']}" if result["against"] else ""
    rows: list[tuple[str, object]] = [
        ("store", result["store"]),
        ("entropy", f"{result['entropy_nats']:.4f} nats per token, over {result['tokens']:,} tokens"),
        ("wanted", f"{result['wanted_nats']:.4f} nats{of}"),
    ]
    for name, flag in _NAMES.items():
        if name in result["unreachable"]:
            rows.append((flag, f"none: {result['unreachable'][name]}"))
        else:
            rows.append((flag, f"{result[name]:.4g} gives {result[f'{name}_nats']:.4f} nats ({_COMMANDS[name]})"))
    lines = ["", table(rows)]
    if "lam_flags" in result:
        lines.append(
            "\nTo encode with that penalty, run the store's encode-lsp command with these flags, and without those "
            "that say how a dictionary is learned:"
        )
        lines.append(f"  {shell_join(result['lam_flags'])}")
    return "\n".join(lines)
