"""Make text from untrusted sources safe to show on terminals and in Markdown, and remove credentials from URLs.

    printable("bundled\\x1b[2J")                       # bundled\\x1b[2J, in visible characters
    redacted("https://me:secret@host/lsp?sig=1")      # https://host/lsp?***
    code_span("a | `b`")                              # for a cell of a Markdown table
    without_directories("/home/ann/wiki.txt")         # wiki.txt
    shell_join(["show-lsp", "my store"])              # show-lsp 'my store', to be pasted into a shell

A store or an export from someone else may have anything in its names, settings and lineage: line breaks that fake more
lines, terminal escape sequences, marks that reverse the direction of text, Markdown, bytes that are not UTF-8. So
printed text goes through `printable`, text in Markdown through `code_span` or `markdown_text`, and stored addresses
through `redacted`. HTML is escaped by Jinja2, and JSON escapes by itself.
"""

import dataclasses
import re
import shlex
from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

# C0 and C1 controls, marks that reverse the direction of text, invisible characters (except the joiners that some
# scripts need), line separators, lone surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffc\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_NAMED = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_USER_IS_SECRET = ("http", "https", "ftp", "ftps")  # the user part may be an access token
_NOT_A_PASSWORD = ("github",)  # github://organisation:repository@revision
# Scheme, then user and password up to the last @ before the path; a password may contain a slash by mistake, and an
# address converted to a path has only one slash after the scheme. A space in a password is an error, but not shown.
_CREDENTIALS = re.compile(
    r"(?<![\w+.-])(?P<scheme>[A-Za-z][\w+.-]*):(?P<slashes>//?)(?P<user>[^\s/?#:@'\"]*)"
    r"(?P<password>:[^\s/?#]*@|:(?!\d*(?:[/?#\s'\"]|$))(?:[^\s]*|[^/?#'\"]*)@|[^\s/?#]*@)"
)
_SPACED_USER = re.compile(
    r"^\s*(?P<scheme>[A-Za-z][\w+.-]*):(?P<slashes>//?)(?P<user>[^/?#:@]*)(?P<password>(?::[^/?#]*)?@)"
)
_LOCAL = re.compile(
    r"file:|[~/]|\.{1,2}/|[^/\n]+/[^/\n]+/|[^/\n]+/[^/\n]+\.(?:txt|parquet|json\w*|ndjson|npy|npz|gz|xz|bz2|zst)$"
)
_QUERY = re.compile(r"(?P<address>(?<![\w+.-])[A-Za-z][\w+.-]*://[^\s?#'\"]+)\?[^\s#'\"<>)\]]+")


def printable(text: object, keep: str = "\n\t") -> str:
    """The text with every character that a terminal would act on shown as an escape like \\x1b.

    keep  characters to leave unchanged; with "" the result is one line
    A byte that is not UTF-8, which Python carries as a lone surrogate, is shown as that byte.
    """
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), str(text))


def shell_quote(word: object) -> str:
    """One word of a command that the user pastes into a shell, on one line.

    A name that `printable` would change is written as $'...' (bash, zsh, ksh), which the shell turns into its bytes.
    """
    text = str(word)
    if not _UNPRINTABLE.search(text):
        return shlex.quote(text)

    def escape(found: re.Match) -> str:  # surrogates that cannot come from a file name are encoded like the others
        errors = "surrogateescape" if "\udc80" <= found[0] <= "\udcff" else "surrogatepass"
        return "".join(f"\\x{byte:02x}" for byte in found[0].encode("utf-8", errors))

    quoted = re.sub(r"['\\]", r"\\\g<0>", text)
    return f"$'{_UNPRINTABLE.sub(escape, quoted)}'"


def shell_join(words: Iterable[object]) -> str:
    """Words as one command that the user can paste into a shell."""
    return " ".join(map(shell_quote, words))


def printable_values(value: Any, but: Collection[str] = ()) -> Any:
    """The same value with every string in its dicts, lists and tuples printable, each on one line.

    but  keys of dicts whose values are not changed
    """
    if isinstance(value, str):
        return printable(redacted(value), keep="")
    if isinstance(value, dict):
        return {
            printable_values(name): part if name in but else printable_values(part, but) for name, part in value.items()
        }
    if isinstance(value, list):
        return [printable_values(part, but) for part in value]
    if type(value) is tuple:
        return tuple(printable_values(part, but) for part in value)
    return value


def redacted(text: object) -> str:
    """The text with user, password and query removed from every URL in it.

    The result can still be used as an address, if the credentials are supplied in another way (docs/remote.md).
    """
    return _QUERY.sub(r"\g<address>?***", _CREDENTIALS.sub(_without_credentials, str(text)))


def redacted_settings(value: Any) -> Any:
    """Settings in dicts and lists, `redacted`. One that is an address may have a space in its user, which ends an
    address in running text.
    """
    if isinstance(value, str):
        return redacted(_SPACED_USER.sub(_without_credentials, value))
    if isinstance(value, dict):
        return {name: redacted_settings(part) for name, part in value.items()}
    return [redacted_settings(part) for part in value] if isinstance(value, list) else value


def without_credentials(url: str) -> str:
    """One URL without user and password; its query stays."""
    return _CREDENTIALS.sub(_without_credentials, url, count=1)


def secrets_of(url: str) -> list[str]:
    """What `redacted` removes from one URL: user with password, password, query; the longest first."""
    found, query = _CREDENTIALS.search(url), url.partition("?")[2]
    secrets = {query}
    if found and without_credentials(url) != url:
        password = found["password"].rstrip("@").removeprefix(":")
        secrets |= {password, f"{found['user']}{found['password']}".rstrip("@")}
    return sorted(secrets - {""}, key=len, reverse=True)


def code_span(value: object) -> str:
    """A value as a Markdown code span on one line, also safe inside a table."""
    text = printable(value, keep="")
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    space = " " if text[:1] in ("`", " ") or text[-1:] in ("`", " ") or not text else ""
    return f"{fence}{space}{text}{space}{fence}".replace("|", r"\|")


def markdown_text(value: object) -> str:
    """Escape a value for a line of Markdown, so that nothing in it is markup, a link or HTML."""
    return re.sub(r"([\\`*_\[\]<>&|~#$])", r"\\\1", printable(value, keep=""))


def without_directories(value: Any) -> Any:
    """Replace every local path in a JSON value, as a string or as a key, by its last component.

    Directories may be named after people and projects, which should not be published with the value. A string is a path
    if it is absolute, starts with . or ~, has more parts than a Hub id (OWNER/NAME), or has the extension of a text or
    settings file. Addresses, Hub ids and strings that may be ids are not changed. A model in the Hub's cache becomes
    its id, a run's export becomes the run's name. Keys that become equal are numbered.
    """
    if isinstance(value, list | tuple):
        return [without_directories(part) for part in value]
    if isinstance(value, dict):
        found: dict = {}
        seen: Counter = Counter()
        for name, part in value.items():
            shown = without_directories(name)
            seen[shown] += 1
            found[shown if seen[shown] == 1 else f"{shown} ({seen[shown]})"] = without_directories(part)
        return found
    if not isinstance(value, str):
        return value
    parts = [part for part in value.split("/") if part not in ("", "export")] if _LOCAL.match(value) else []
    return hub_id(value) or (parts[-1] if parts else value)


def hub_id(path: str) -> str | None:
    """OWNER/NAME of a model or dataset, if the path is its directory in the Hub's cache; None for other paths."""
    found = re.search(r"(?:^|/)(?:model|dataset)s--([\w.-]+)/snapshots/", path)
    return None if found is None else found[1].replace("--", "/")


def _escape(character):
    if character in _NAMED:
        return _NAMED[character]
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:
        number -= 0xDC00
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _without_credentials(match):
    scheme, user, password = match["scheme"].lower(), match["user"], match["password"]
    protocol = scheme.rpartition("+")[2]
    if protocol in _NOT_A_PASSWORD:
        return match[0]
    if protocol in _USER_IS_SECRET:
        return f"{match['scheme']}:{match['slashes']}"
    return f"{match['scheme']}:{match['slashes']}{user}@" if password.startswith(":") else match[0]


def words_of(value: object) -> str:
    """The value of a setting as it is written after its flag on a command line."""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def also_row(config: Any, origins: Mapping[str, str], shown: Container[str]) -> list[tuple[str, object, str | None]]:
    """A row of `settings_table` for the settings that have an origin and are not shown in other rows; empty if none."""
    others = [
        f"{field.name.replace('_', '-')} {words_of(getattr(config, field.name))} ({origins[field.name]})"
        for field in dataclasses.fields(config)
        if field.name in origins and field.name not in shown
    ]
    return [("also", ", ".join(others), None)] if others else []


def settings_table(title: str, rows: Iterable[tuple[str, object, str | None]]) -> str:
    """Lay out the table that a command prints before it starts.

    rows  (name, value, source of the value; None if the source is not shown)
    """
    rows = [(name, printable(value, keep=""), origin) for name, value, origin in rows]
    width = max(len(name) for name, _, _ in rows)
    lines = [f"  {name:<{width}}  {value}" + (f"   [{origin}]" if origin else "") for name, value, origin in rows]
    return "\n".join([f"{title}:", *lines])
