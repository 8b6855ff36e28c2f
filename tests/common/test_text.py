"""Untrusted text cannot control a terminal, break out of Markdown, or show a password."""

import os
import re
import subprocess

import pytest
from rich.console import Console
from rich.markdown import Markdown

from mlsm.common.text import (
    code_span,
    printable,
    printable_values,
    redacted,
    redacted_settings,
    shell_join,
    without_credentials,
    without_directories,
)

pytestmark = [
    pytest.mark.promise("user and password …"),
    pytest.mark.promise("line breaks, Markdown …"),
    pytest.mark.promise("43 text of others …"),
]

HOSTILE = "a\x1b[2J\x1b]0;owned\x07b\r\x9b1m c\u202egnp.exe\u2028 d\x00 e\udcff"


def test_what_is_printed_has_no_character_that_acts():
    shown = printable(HOSTILE + "\n\tλ 日本 é 👩\u200d🔬", keep="\n\t")
    assert shown == (r"a\x1b[2J\x1b]0;owned\x07b\r\x9b1m c\u202egnp.exe\u2028 d\x00 e\xff" + "\n\tλ 日本 é 👩\u200d🔬")
    shown.encode()
    everything = "".join(map(chr, [*range(0x3000), *range(0xD7F0, 0xE010), *range(0xFE00, 0x10000)]))
    assert not [one for one in printable(everything, keep="") if not one.isprintable() and ord(one) < 0x20]
    assert printable("a\nb", keep="") == r"a\nb"


def test_a_command_can_be_pasted_whatever_the_names_in_it_are():
    """Oracle: what bash hands to a program."""
    words = [
        b"a b",
        b"caf\xe9",
        b"it's\xff'",
        b"line\nbreak",
        b"back\\slash\x07",
        "d\u202ee λ".encode(),
        b"$HOME`x`",
        b"-",
    ]
    command = shell_join(map(os.fsdecode, words))
    assert printable(command, keep="") == command  # and so it is when an error shows it
    found = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True).stdout
    assert found.split(b"\0")[:-1] == words


def test_values_keep_their_shape_and_places_stay():
    value = {"store": "a\nb", "rows": [("x\x1b", 1.5, None)], "\x07": {"url": "https://u:p@h/x"}}
    assert printable_values(value, {"store"}) == {
        "store": "a\nb",
        "rows": [(r"x\x1b", 1.5, None)],
        r"\x07": {"url": "https://h/x"},
    }


@pytest.mark.parametrize("value", ["plain", "a | b", "``x`", "`", "", "a\n# title\n```\n<script>", "`|`"])
def test_a_code_span_is_one_in_a_table(value):
    table = f"| | |\n|---|---|\n| name | {code_span(value)} |\n\nAfter."
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(Markdown(table))
    rendered = console.export_text()
    assert "After." in rendered and not re.search("━|╭|title$", rendered.replace("━" * 3, ""), re.MULTILINE)
    cell = next(line for line in rendered.splitlines() if "name" in line)
    assert cell.split("name", 1)[1].strip(" │|") == printable(value, keep="").strip()


SECRET = "hunter2"
URLS = {
    f"https://me:{SECRET}@host:8080/lsp": "https://host:8080/lsp",
    f"https://{SECRET}@host/lsp": "https://host/lsp",
    f"http://me:{SECRET}@more@host/lsp@v1": "http://host/lsp@v1",
    f"http://me:{SECRET}/7@host/lsp": "http://host/lsp",
    f"http://me:{SECRET} x@host/lsp": "http://host/lsp",
    f"sftp://me:{SECRET}@host/lsp": "sftp://me@host/lsp",
    f"simplecache::https://me:{SECRET}@host/lsp": "simplecache::https://host/lsp",
    f"https://bucket/lsp?X-Signature={SECRET}&a=b": "https://bucket/lsp?***",
    "https://host:8080/a@b:c": "https://host:8080/a@b:c",
    "http://[::1]:80/lsp": "http://[::1]:80/lsp",
    "abfs://container@account.host/lsp": "abfs://container@account.host/lsp",
    "github://org:repo@main/lsp": "github://org:repo@main/lsp",
    "hf://datasets/me/stores@main/lsp": "hf://datasets/me/stores@main/lsp",
}


def test_a_space_in_a_setting_does_not_show_its_secret():
    url = f"https://{SECRET[:3]} {SECRET[3:]}@host/lsp"
    values = {"store": url, "other": [f"http://me you:{SECRET}@host", 3, None], "text": "mail me@host"}
    shown = {"store": "https://host/lsp", "other": ["http://host", 3, None], "text": "mail me@host"}
    assert redacted_settings(values) == shown
    assert {url: redacted_settings(url) for url in URLS} == URLS


@pytest.mark.parametrize("url", URLS)
def test_credentials_are_taken_out_and_what_is_left_is_an_address(url):
    assert redacted(url) == URLS[url]
    assert without_credentials(url) == URLS[url].replace("***", f"X-Signature={SECRET}&a=b")
    assert redacted(f"Error at '{url}', and {url}; mail me@host") == (
        f"Error at '{URLS[url]}', and {URLS[url]}; mail me@host".replace("***;", "***")
    )


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/home/ann/wiki.txt", "wiki.txt"),
        ("~/texts/wiki.txt", "wiki.txt"),
        ("../ann/wiki/", "wiki"),
        ("ann/texts/wiki.txt", "wiki.txt"),
        ("ann/wiki.txt", "wiki.txt"),
        ("ann/wiki-1.jsonl.xz", "wiki-1.jsonl.xz"),
        ("ann/config.json", "config.json"),
        ("google/bert-1.5b", "google/bert-1.5b"),
        ("file:///home/ann/a.txt", "a.txt"),
        ("/home/ann/runs/students/mlsm-1/export", "mlsm-1"),
        ("/home/ann/hub/models--google--bert/snapshots/0a1b", "google/bert"),
        ("/home/ann/hub/models--bert-base-cased/snapshots/0a1b/", "bert-base-cased"),
        ("/", "/"),
        ("google/bert", "google/bert"),
        ("bert-2x32", "bert-2x32"),
        ("hf://datasets/allenai/c4/en/0.parquet", "hf://datasets/allenai/c4/en/0.parquet"),
        ("https://example.org/a/b.txt", "https://example.org/a/b.txt"),
        (1.5, 1.5),
        (None, None),
    ],
)
def test_of_a_local_path_the_last_part_is_shown(given, shown):
    assert without_directories(given) == shown
    assert without_directories({"x": [given]}) == {"x": [shown]}


def test_paths_that_become_equal_are_all_kept():
    given = {"/ann/a.txt": 1, "/bob/a.txt": 2, "/eve/a.txt": {"from": ("/eve/b.txt",)}}
    assert without_directories(given) == {"a.txt": 1, "a.txt (2)": 2, "a.txt (3)": {"from": ["b.txt"]}}
