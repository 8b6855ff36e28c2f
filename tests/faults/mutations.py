"""Ways to spoil a store, run, dictionary, export or record: what an accident does, and what somebody might craft.

    for spoil in DAMAGE + CRAFTED:
        what = spoil(dice, Scene(root, other, canary))       # a sentence, None where there is nothing of the kind

Damage leaves checksums and hashes as they were; a reader must find it, or not need what was damaged. What is crafted
has right checksums and hashes, so that its content reaches the parsers; a reader must refuse it or make something well
formed of it. Every choice comes from `dice`, a random.Random. Reading the result and checking it is in fuzz.py.
"""

import errno
import hashlib
import io
import json
import os
import pickle
import shutil
import socket
import stat
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shards.copies import dictionary_fingerprint
from shards.manifest import fingerprint, with_checksum
from student.runs.checkpoint import _checksum as checksum_of_state

SECRET = "the-canary-sings"


class Scene(NamedTuple):
    """Where a mutation takes place.

    root    directory that is spoiled
    other   one of the same kind with other content
    canary  directory outside, which nobody may change, nor carry the secret out of
    """

    root: Path
    other: Path
    canary: Path

    def files(self, *endings):
        """Regular files under the root, in order; with one of some endings, if any are given."""
        found = sorted(path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink())
        return [path for path in found if not endings or path.name.endswith(endings)]

    def said(self, path):
        return str(path.relative_to(self.root))


def _choose(dice, scene, *endings):
    """One of the files: small kinds as often as shards, however many shards there are; None without any."""
    files = scene.files(*endings)
    kinds = sorted({(path.parent.name, path.suffix) for path in files})
    if not kinds:
        return None
    kind = dice.choice(kinds)
    return dice.choice([path for path in files if (path.parent.name, path.suffix) == kind])


# -- bytes ------------------------------------------------------------------------------------------------


def _of_bytes(change):
    def spoil(dice, scene):
        path = _choose(dice, scene)
        raw = bytearray(path.read_bytes()) if path else b""
        if not raw:
            return None
        what = change(dice, raw)
        path.unlink()  # never through a hard link
        path.write_bytes(raw)
        return f"{scene.said(path)}: {what}"

    spoil.__name__ = change.__name__
    return spoil


def _span(dice, raw, most=4096):
    start = dice.randrange(len(raw))
    return start, min(len(raw), start + 1 + dice.randrange(dice.choice([1, 16, 512, most])))


@_of_bytes
def flip_bits(dice, raw):
    places = [dice.randrange(8 * len(raw)) for _ in range(dice.choice([1, 1, 1, 8]))]
    for place in places:
        raw[place // 8] ^= 1 << place % 8
    return f"bits {places} flipped"


@_of_bytes
def cut(dice, raw):
    length = dice.choice([0, 1, len(raw) - 1, len(raw) // 512 * 512, dice.randrange(len(raw))])
    del raw[length:]
    return f"cut to {length} bytes"


@_of_bytes
def extend(dice, raw):
    more = dice.choice([b"\0", b"\n", b"}", bytes(512), bytes(10_240), dice.randbytes(100)])
    raw += more
    return f"{len(more)} bytes appended"


@_of_bytes
def duplicate_span(dice, raw):
    start, stop = _span(dice, raw)
    raw[stop:stop] = raw[start:stop]
    return f"bytes {start} to {stop} twice"


@_of_bytes
def remove_span(dice, raw):
    start, stop = _span(dice, raw)
    del raw[start:stop]
    return f"bytes {start} to {stop} removed"


@_of_bytes
def overwrite_span(dice, raw):
    start, stop = _span(dice, raw)
    value = dice.choice([0, 0, 0xFF, 0x20, None])
    raw[start:stop] = dice.randbytes(stop - start) if value is None else bytes([value]) * (stop - start)
    return f"bytes {start} to {stop} set to {'noise' if value is None else value}"


# -- files ------------------------------------------------------------------------------------------------


def delete_file(dice, scene):
    if (path := _choose(dice, scene)) is None:
        return None
    path.unlink()
    return f"{scene.said(path)} deleted"


def exchange_files(dice, scene):
    path = _choose(dice, scene)
    others = [other for other in scene.files(path.suffix) if other != path] if path else []
    if not others:
        return None
    other = dice.choice(others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    for place, raw in ((path, theirs), (other, mine)):
        place.unlink()
        place.write_bytes(raw)
    return f"{scene.said(path)} and {scene.said(other)} exchanged"


def take_from_other(dice, scene):
    """The file of the same name, or one of the same kind, of another store, run or export."""
    if (path := _choose(dice, scene)) is None:
        return None
    same = scene.other / path.relative_to(scene.root)
    pool = sorted(p for p in (scene.other / path.parent.relative_to(scene.root)).glob(f"*{path.suffix}") if p.is_file())
    if not same.is_file() and not pool:
        return None
    source = same if same.is_file() else dice.choice(pool)
    path.unlink()
    path.write_bytes(source.read_bytes())
    return f"{scene.said(path)} replaced by {source.name} of another"


def _socket(path):
    before = os.getcwd()
    os.chdir(path.parent)  # the names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        try:
            made.bind(path.name)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG and "too long" not in str(error):
                raise
            os.mkfifo(path.name)
    os.chdir(before)


def _device(path):
    """/dev/zero by a name of its own, where this user may make one."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


INSTEAD = {
    "a pipe": lambda path, _: os.mkfifo(path),
    "a directory": lambda path, _: path.mkdir(),
    "a link to itself": lambda path, _: path.symlink_to(path.name),
    "a dangling link": lambda path, _: path.symlink_to("nowhere"),
    "a socket": lambda path, _: _socket(path),
    "a link to a secret": lambda path, scene: path.symlink_to(scene.canary / "secret.json"),
    "a link to a directory outside": lambda path, scene: path.symlink_to(scene.canary),
    "a link to a directory above": lambda path, _: path.symlink_to(".."),
    "a link to a new file outside": lambda path, scene: path.symlink_to(scene.canary / "new.txt"),
    "a second name of a file outside": lambda path, scene: os.link(scene.canary / "plain.txt", path),
    "a link to /dev/zero": lambda path, _: path.symlink_to("/dev/zero"),
    "a link to /dev/full": lambda path, _: path.symlink_to("/dev/full"),
    "a link to /dev/tty": lambda path, _: path.symlink_to("/dev/tty"),
    "a device": lambda path, _: _device(path),
}


def put_no_file_in_its_place(dice, scene):
    if (path := _choose(dice, scene)) is None:
        return None
    path.unlink()
    instead = dice.choice(sorted(INSTEAD))
    INSTEAD[instead](path, scene)
    return f"{scene.said(path)}: {instead} in its place"


def spoil_directory(dice, scene):
    found = sorted(path for path in scene.root.rglob("*") if path.is_dir() and not path.is_symlink())
    if not found:
        return None
    path = dice.choice(found)
    shutil.rmtree(path)
    instead = dice.choice(["nothing", *sorted(INSTEAD)])
    if instead != "nothing":
        INSTEAD[instead](path, scene)
    return f"{scene.said(path)}/: {instead} in its place"


def move_outside(dice, scene):
    """The same bytes, by a link or a second name, outside of the root: whoever writes in place would change them."""
    if (path := _choose(dice, scene)) is None:
        return None
    outside = scene.root.parent / f"outside-{path.name}"
    if os.path.lexists(outside):
        return None
    path.rename(outside)
    how = dice.choice(["symbolic", "hard"])
    path.symlink_to(outside) if how == "symbolic" else os.link(outside, path)
    return f"{scene.said(path)}: a {how} link to itself outside"


def add_strays(dice, scene):
    found = sorted(path for path in [scene.root, *scene.root.rglob("*")] if path.is_dir() and not path.is_symlink())
    directory = dice.choice(found)
    name = dice.choice(["notes.json", "x.tar", ".x.tmp", "tokenizer.py", "model.py", "pytorch_model.bin", "a\nb.json",
                        "step-99999999", "step-x", "log.jsonl", b"\xff\xfe.json".decode(errors="surrogateescape"),
                        "plans", "units", "0" * 32 + ".json", "added_tokens.json"])  # fmt: skip
    path = directory / name
    if os.path.lexists(path):
        return None
    if dice.random() < 0.5:
        INSTEAD[dice.choice(sorted(INSTEAD))](path, scene)
    else:
        path.write_bytes(dice.choice([b"", b"{}", b"[]", b"null", b"\xff" * 50, Pickle(scene.canary).dumps()]))
    return f"{directory.relative_to(scene.root)}/{name!a} added"


WRITTEN = (
    "log.damaged", "log.jsonl", "lock", "config.json", "result.json", "tracking", "tracking/id", "tracking/tensorboard",
    "tracking/tensorboard.step", "export", "checkpoints", "units", "plans", "tokenizer", "dictionary", "stores",
    "dictionaries", "comparison", "pages", "run", "run/lock", "run/log.damaged", "run/tracking", "view.json",
)  # fmt: skip


def take_a_place(dice, scene):
    """Something that is no file where a command would write one, or a directory."""
    places = [scene.root / name for name in WRITTEN]
    free = [path for path in places if path.parent.is_dir() and not os.path.lexists(path)]
    if not free:
        return None
    path, instead = dice.choice(free), dice.choice(sorted(INSTEAD))
    INSTEAD[instead](path, scene)
    return f"{scene.said(path)}: {instead} in its place before it is written"


def change_mode(dice, scene):
    if (path := _choose(dice, scene)) is None:
        return None
    mode = dice.choice([0o000, 0o200, 0o777, 0o4755])
    path.chmod(mode)
    return f"{scene.said(path)}: mode {mode:o}"


def age(dice, scene):
    if (path := _choose(dice, scene)) is None:
        return None
    when = dice.choice([0, 1, 2**33, 1e9])
    os.utime(path, (when, when))
    return f"{scene.said(path)}: of the second {when:g}"


# -- JSON text --------------------------------------------------------------------------------------------

_TEXTS = {
    "deep": lambda raw: b"[" * 100_000 + b"]" * 100_000,
    "deep objects": lambda raw: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "70 deep": lambda raw: b"[" * 70 + b"]" * 70,
    "NaN": lambda raw: b"NaN",
    "giant number": lambda raw: b"1" * 10_000,
    "empty": lambda raw: b"",
    "a byte order mark": lambda raw: b"\xef\xbb\xbf" + raw,
    "UTF-16": lambda raw: raw.decode("utf-8", "replace").encode("utf-16"),
    "null": lambda raw: b"null",
    "a list": lambda raw: b"[]",
    "an empty object": lambda raw: b"{}",
    "a number": lambda raw: b"3",
    "a text": lambda raw: b'"\\ud800"',
    "a web page": lambda raw: b"<!DOCTYPE html><html></html>",
    "no UTF-8": lambda raw: raw[:20] + b"\xff" + raw[20:],
    "every number NaN": lambda raw: raw.replace(b": 1", b": NaN"),
    "every number too large": lambda raw: raw.replace(b": 1", b": 1e999"),
    "every number 400 digits long": lambda raw: raw.replace(b": 1", b": " + b"1" * 400),
    "twice": lambda raw: raw + raw,
    "keys twice": lambda raw: raw.replace(b"{", b'{"a": 1, "a": 2,', 1),
}


def rewrite_text(dice, scene):
    path = _choose(dice, scene, ".json", ".jsonl", ".yaml")
    if path is None:
        return None
    raw, how = path.read_bytes(), dice.choice(sorted(_TEXTS))
    path.unlink()
    path.write_bytes(_TEXTS[how](raw))
    return f"{scene.said(path)}: {how}"


# -- JSON values, with checksums ----------------------------------------------------------------------------

_VALUES = [
    None, True, False, -1, 0, 1, 2, 1.5, -0.0, 255, 256, 65_536, 2**24, 2**31, 2**63 - 1, 2**63, 2**70, 10**400, 1e308,
    -1e308, "", "x", "0" * 32, "f" * 64, "../../etc/passwd", "/etc/passwd", "..", ".", "a/b", "a\nb\x1b[2J", "\u202e",
    "x" * 70_000, "train", "held_out", "lsp", "ids", "logits", "mlsm", "cuda", [], {}, [[]], [None], [1, 2], [{}],
    {"a": {"b": []}}, ["a", "b"], [1e308] * 3, "file:///etc/passwd", "http://127.0.0.1:9/x", "bert-1x16", "bert",
]  # fmt: skip


def _places(value, path=()):
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _places(inner, (*path, name))


def change_value(dice, value):
    """Another JSON value, with one place changed; and what was."""
    place = dice.choice(list(_places(value))[1:] or [()])
    if not place:
        return dice.choice(_VALUES), "all of it"
    *outer, name = place
    holder = value
    for step in outer:
        holder = holder[step]
    said = ".".join(map(str, place))
    how = dice.choice(["replace"] * 6 + ["remove", "add", "rename", "nest", "shift"])
    if how == "remove":
        del holder[name]
    elif how == "add" and isinstance(holder, dict):
        holder[dice.choice(["x", "", "__class__", "auto_map", "file", "a\nb"])] = dice.choice(_VALUES)
    elif how == "rename" and isinstance(holder, dict):
        holder[dice.choice(["x", "", str(name).upper()])] = holder.pop(name)
    elif how == "nest":
        for _ in range(dice.choice([1, 50, 200])):
            holder[name] = [holder[name]]
    elif how == "shift" and type(holder[name]) in (int, float):
        holder[name] += dice.choice([-1, 1, 0.5, 1000])
    elif how == "shift" and isinstance(holder[name], list):
        dice.choice([holder[name].reverse, lambda: holder[name].extend(holder[name]), holder[name].clear])()
    else:
        how, holder[name] = "replace", dice.choice(_VALUES)
        return value, f"{said} set to {_short(holder[name])}"
    return value, f"{said}: {how}"


def _short(value):
    text = ascii(value) if not isinstance(value, int) or value < 10**30 else "a giant number"
    return text if len(text) < 60 else text[:60] + "..."


def craft_json(dice, scene):
    """Change values of a JSON file, with checksums, fingerprints and names as if it had been written so."""
    path = _choose(dice, scene, ".json")
    try:
        values = json.loads(path.read_bytes()) if path else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict | list):
        return None
    said = []
    for _ in range(dice.choice([1, 1, 2])):
        values, what = change_value(dice, values)
        said.append(what)
        if not isinstance(values, dict | list):
            break
    name = scene.said(path)
    write_sealed(scene.root, path, values, follow=dice.random() < 0.7)
    return f"{name}, sealed: {'; '.join(said)}"


def craft_line(dice, scene):
    """Change the values of one line of a log."""
    path = _choose(dice, scene, ".jsonl")
    lines = path.read_bytes().splitlines(keepends=True) if path else []
    if not lines:
        return None
    number = dice.randrange(len(lines))
    try:
        value, what = change_value(dice, json.loads(lines[number]))
    except (ValueError, RecursionError):
        return None
    lines[number] = (json.dumps(value) + "\n").encode()
    path.unlink()
    path.write_bytes(b"".join(lines))
    return f"{scene.said(path)} line {number + 1}: {what}"


def write_sealed(root, path, values, follow=False):
    """Write a JSON file of ours with its checksum; of a target also into the records, when that should `follow`."""
    place = path
    try:
        if path.name == "target.json" and isinstance(values.get("settings"), dict):
            values["target"] = fingerprint(values["settings"])
            values = with_checksum(values)
            if follow:
                _follow(root, values["target"])
        elif path.parent.name == "units":
            values = with_checksum(values)
        elif path.parent.name == "plans":
            ids = [[unit["id"], unit["split"]] for unit in values["units"]]
            values["plan"] = fingerprint({"windowing": values["windowing"], "units": ids})
            values, place = with_checksum(values), path.with_name(f"{values['plan']}.json")
        elif path.name == "state.json":
            values["checksum"] = checksum_of_state(values)
    except (TypeError, KeyError, AttributeError, ValueError, RecursionError):
        pass  # no longer what could have a checksum
    path.unlink()
    place.write_text(json.dumps(values, indent=1))


def _follow(root, target_id):
    for path in sorted(root.glob("units/*.json")) if not (root / "units").is_symlink() else ():
        record = json.loads(path.read_bytes()) if path.is_file() and not path.is_symlink() else None
        if isinstance(record, dict):
            write_sealed(root, path, record | {"target": target_id})


# -- shards and arrays, with hashes ---------------------------------------------------------------------------


class Pickle:
    """What would leave a mark if it were unpickled."""

    def __init__(self, canary):
        self.mark = str(canary / "pickle-was-run")

    def dumps(self):
        return pickle.dumps(self)

    def __reduce__(self):
        return open, (self.mark, "w")


def craft_shard(dice, scene):
    """Change members of a shard, with hashes, record and names as if it had been written so."""
    path = _choose(dice, scene, ".tar")
    units = sorted(path.parent.glob("*.json")) if path else []
    records = [record for record in units if record.is_file() and path.name.startswith(f"{record.stem}-")]
    try:
        record = json.loads(records[0].read_bytes())
        raw = path.read_bytes()
        parts = [(dict(group), raw[group["offset"] : group["offset"] + group["length"]]) for group in record["groups"]]
        parts, what = dice.choice([_change_member] * 6 + [_change_structure] * 3 + [_change_groups])(dice, scene, parts)
    except (LookupError, ValueError, TypeError, RecursionError, tarfile.TarError):
        return None  # spoilt already
    name = scene.said(path)
    path.unlink()
    write_shard(path.parent, records[0], record, parts)
    return f"{name}, sealed: {what}"


def write_shard(units, record_file, record, parts):
    """Write a shard of (group, bytes), and its record."""
    offset, groups = 0, []
    for group, raw in parts:
        groups.append(group | {"offset": offset, "length": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
        offset += len(raw)
    end = member("__end__/end.json", json.dumps({"groups": groups}, sort_keys=True).encode())
    raw = b"".join(part for _, part in parts) + end + bytes(1024)
    digest = hashlib.sha256(raw).hexdigest()
    record |= {"groups": groups, "bytes": len(raw), "sha256": digest, "file": f"{record['unit']}-{digest[:12]}.tar"}
    (units / record["file"]).write_bytes(raw)
    write_sealed(units.parent, record_file, record)


def member(name, payload, format=tarfile.USTAR_FORMAT, **attributes):
    """The bytes of one tar member."""
    header = tarfile.TarInfo(name)
    header.size = len(payload)
    for key, value in attributes.items():
        setattr(header, key, value)
    return header.tobuf(format) + payload + bytes(-len(payload) % 512)


def members(raw):
    """[(name, payload)] of tar members."""
    found, place = [], 0
    while place < len(raw):
        header = tarfile.TarInfo.frombuf(raw[place : place + 512], "utf-8", "strict")
        found.append((header.name, raw[place + 512 : place + 512 + header.size]))
        place += 512 + header.size + -header.size % 512
    return found


def _joined(found):
    return b"".join(member(name, payload) for name, payload in found)


def _arrays(dice, parts):
    """One part of arrays: its place, and its members."""
    place = dice.choice([i for i, (group, _) in enumerate(parts) if group["name"] != "__meta__"])
    return place, members(parts[place][1])


def _change_member(dice, scene, parts):
    place, found = _arrays(dice, parts)
    number = dice.randrange(len(found))
    name, payload = found[number]
    payload, what = dice.choice([change_array] * 3 + [_change_header])(dice, payload, scene)
    found[number] = name, payload
    group = parts[place][0]
    if "windows" in group and dice.random() < 0.3:
        counts = {"lengths.npy": "windows", "ids.npy": "tokens"}
        with suppress(Exception):  # whatever np.load makes of a header that is no array's now
            for ending, count in counts.items():
                if name.endswith(ending):
                    group[count] = len(_array(payload))
    parts[place] = group, _joined(found)
    return parts, f"{name}: {what}"


def _array(payload):
    return np.load(io.BytesIO(payload), allow_pickle=False)


def _npy(array, version=(1, 0)):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array, version=version, allow_pickle=True)
    return buffer.getvalue()


def change_array(dice, payload, scene):
    """The .npy bytes of other values, of the same type and mostly as many."""
    array = _array(payload).copy()
    flat = array.reshape(-1)
    if not len(flat):
        return _npy(np.ones(3, array.dtype)), "three ones"
    info = np.finfo(array.dtype) if array.dtype.kind == "f" else np.iinfo(array.dtype)
    odd = [np.nan, np.inf, -1.0] if array.dtype.kind == "f" else [2, 24, 65]
    value = dice.choice([0, 1, info.max, info.min, *odd])
    start, stop = sorted((dice.randrange(len(flat)), dice.randrange(len(flat) + 1)))
    what = dice.choice(["one", "span", "all", "reverse", "sort", "roll", "append", "shorten", "empty"])
    if what == "one":
        flat[start] = value
    elif what == "span":
        flat[start:stop] = value
    elif what == "all":
        flat[:] = value
    elif what == "append":
        array = np.append(flat, np.full(dice.choice([1, 7]), value, array.dtype))
    elif what == "shorten":
        array = flat[: start or 1]
    elif what == "empty":
        array = flat[:0]
    else:
        flat[:] = {"reverse": flat[::-1].copy(), "sort": np.sort(flat), "roll": np.roll(flat, 1)}[what]
    return _npy(array), f"{what} {value} {start} {stop}"


_HEADERS = [
    "{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000,), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (-1,), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (), }",
    "{'descr': '<u2', 'fortran_order': False, 'shape': (2, 2), }",
    "{'descr': '<u2', 'fortran_order': True, 'shape': (9,), }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': [('a', '<u2'), ('b', '|O')], 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '>u2', 'fortran_order': False, 'shape': (1,), }",
    "{'descr': '<f8', 'fortran_order': False, 'shape': (99999999999999999999,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (0, 32), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True, 32), }",
    "__import__('os').system('touch {canary}/npy-was-run')",
    "(" * 3000 + ")" * 3000,
    "",
]


def _change_header(dice, payload, scene):
    if dice.random() < 0.2:
        return _npy(np.array([Pickle(scene.canary)], object)), "an array of objects"
    if dice.random() < 0.2:
        version = dice.choice([(2, 0), (3, 0)])
        return _npy(_array(payload), version), f"version {version}"
    text = dice.choice(_HEADERS).replace("{canary}", str(scene.canary))
    header = text.encode().ljust(118 - 1) + b"\n"
    length = len(payload[10:]) if dice.random() < 0.1 else len(header)
    data = payload[10 + int.from_bytes(payload[8:10], "little") :]
    return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little", signed=False) + header + data, f"header {text[:70]}"


def _change_structure(dice, scene, parts):
    place, found = _arrays(dice, parts)
    name, payload = dice.choice(found)
    group = parts[place][0]["name"]
    what = dice.choice(["twice", "unknown", "order", "lost", "renamed", "pax", "kind", "size", "checksum", "padding"])
    if what == "twice":
        raw = _joined([*found, (name, payload)])
    elif what == "unknown":
        trap = Pickle(scene.canary).dumps()
        ending, content = dice.choice(
            [("pyd", trap), ("py", b"raise SystemExit"), ("json", b"{}"), ("npy", payload), ("pickle", trap)]
        )
        raw = _joined([*found, (f"{group}.x.{ending}", content)])
    elif what == "order":
        dice.shuffle(found)
        raw = _joined(found)
    elif what == "lost":
        raw = _joined([entry for entry in found if entry[0] != name])
    elif what == "renamed":
        other = dice.choice(["../../canary/x.npy", "/tmp/x.npy", f"{group}.x.npy", "000001.ids.npy", name.upper(), "x"])
        raw = _joined([(other if entry[0] == name else entry[0], entry[1]) for entry in found])
    elif what == "pax":
        pax = member(name, payload, tarfile.PAX_FORMAT, pax_headers={"path": name, "comment": "x" * 200})
        raw = _joined([entry for entry in found if entry[0] != name]) + pax
    elif what == "kind":
        kind = dice.choice([tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE, b"L"])
        raw = _joined([entry for entry in found if entry[0] != name])
        raw += member(name, payload, type=kind, linkname="/etc/passwd")
    elif what == "size":
        size = dice.choice([0, 1, len(payload) + 1, 2**33 - 1])
        header = tarfile.TarInfo(name)
        header.size = size
        raw = header.tobuf(tarfile.USTAR_FORMAT) + payload + bytes(-len(payload) % 512)
        raw = _joined([entry for entry in found if entry[0] != name]) + raw
    elif what == "checksum":
        raw = bytearray(_joined(found))
        raw[148:156] = b"0000000\0"
        raw = bytes(raw)
    else:
        raw = _joined(found) + bytes(dice.choice([1, 512, 1024]))
    parts[place] = parts[place][0], raw
    return parts, f"{group} {what} {name}"


def _change_groups(dice, scene, parts):
    number = dice.randrange(len(parts))
    group, raw = parts[number]
    what = dice.choice(["twice", "lost", "renamed", "counts", "last first", "meta"])
    if what == "twice":
        parts.insert(number, (dict(group), raw))
    elif what == "lost":
        parts.pop(number)
    elif what == "renamed":
        group["name"] = dice.choice(["000009", "__meta__", "__stats__", "x", "../x"])
    elif what == "counts":
        group["windows"] = dice.choice([0, 1, 90, 60_000, 65_536])
        group["tokens"] = dice.choice([0, 1, 90, 60_000, 65_536])
    elif what == "meta":
        meta, changed = change_value(dice, json.loads(members(parts[0][1])[0][1]))
        parts[0] = parts[0][0], member("__meta__/meta.json", json.dumps(meta).encode())
        what = f"meta {changed}"
    else:
        parts.append(parts.pop(0))
    return parts, f"groups: {number} {what}"


def craft_atoms(dice, scene):
    """Change the atoms of a dictionary, with the fingerprint in dictionary.json; in a store, in the target too."""
    path = _choose(dice, scene, "atoms.npy")
    beside = None if path is None else path.with_name("dictionary.json")
    try:
        if beside is None or not beside.is_file() or beside.is_symlink():  # a link would carry the secret in
            return None
        payload, what = dice.choice([change_array, _change_header])(dice, path.read_bytes(), scene)
        record = json.loads(beside.read_bytes())
        target = scene.root / "target.json"
        values = json.loads(target.read_bytes()) if target.is_file() else None
        if not isinstance(record, dict) or not isinstance((values or {"settings": {}})["settings"], dict):
            return None
    except (ValueError, LookupError, TypeError, RecursionError):  # an earlier mutation may have spoilt them
        return None
    path.unlink()
    path.write_bytes(payload)
    try:
        atoms = _array(payload)
        record |= {"fingerprint": dictionary_fingerprint(atoms), "shape": list(atoms.shape)}
    except Exception:  # whatever np.load makes of it
        pass
    write_sealed(scene.root, beside, record)
    if values and dice.random() < 0.8:
        values["settings"]["dictionary"] = record["fingerprint"]
        write_sealed(scene.root, target, values, follow=True)
    return f"{scene.said(path)}, sealed: {what}"


def craft_checkpoint(dice, scene):
    """Change a file of a checkpoint, with its hash in state.json."""
    states = scene.files("state.json")
    if not states:
        return None
    state = dice.choice(states)
    path = _choose(dice, scene._replace(root=state.parent))
    try:
        values = json.loads(state.read_bytes())
        raw = bytearray(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if path == state or not raw or not isinstance(values.get("files"), dict):
        return None
    if dice.random() < 0.3:
        raw, what = bytearray(Pickle(scene.canary).dumps()), "a pickle"
    else:
        what = dice.choice([flip_bits, cut, overwrite_span]).__name__
        change = {"flip_bits": _flip, "cut": _cut, "overwrite_span": _overwrite}[what]
        change(dice, raw)
    path.unlink()
    path.write_bytes(raw)
    values["files"][str(path.relative_to(state.parent))] = hashlib.sha256(raw).hexdigest()
    write_sealed(scene.root, state, values)
    return f"{scene.said(path)}, sealed: {what}"


def _flip(dice, raw):
    raw[dice.randrange(min(len(raw), 400))] ^= 1 << dice.randrange(8)


def _cut(dice, raw):
    del raw[dice.randrange(len(raw)) :]


def _overwrite(dice, raw):
    start = dice.randrange(len(raw))
    raw[start : start + 64] = dice.randbytes(len(raw[start : start + 64]))


DAMAGE = (
    flip_bits, flip_bits, cut, extend, duplicate_span, remove_span, overwrite_span, delete_file, exchange_files,
    take_from_other, put_no_file_in_its_place, put_no_file_in_its_place, put_no_file_in_its_place, spoil_directory,
    spoil_directory, take_a_place, take_a_place, move_outside, add_strays, change_mode, age, rewrite_text, rewrite_text,
)  # fmt: skip
CRAFTED = (
    craft_json,
    craft_json,
    craft_json,
    craft_json,
    craft_line,
    craft_shard,
    craft_shard,
    craft_shard,
    craft_atoms,
    craft_checkpoint,
)
