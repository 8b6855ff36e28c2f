"""Hostile words, and a reader of what a page of show-lsp holds, as its script reads it: not by the code that wrote it.

page = LspPage(directory)
page.lsp(7)         # as StoreView.lsp says it, with the digits that are shown
"""

import json
import re
from itertools import accumulate

HOSTILE = {  # by their place in the vocabulary
    7: "<script>window.hacked=1</script>",
    8: "<img/src=x/onerror=window.hacked=1>",
    9: "{{7*7}}",
    10: "</script>",
    11: "__proto__",
    12: "\"'><b>",
    13: "&lt;",
}


def unpack(packed):
    """Numbers of a string: "#" to "[" is the last digit of one, in base 57, "]" to "~" those before it, in base 34."""
    numbers = []
    for before, last in re.findall(r"([\]-~]*)([#-\[])", packed):
        high = 0
        for digit in before:
            high = 34 * high + "]^_`abcdefghijklmnopqrstuvwxyz{|}~".index(digit)
        numbers.append(57 * high + ord(last) - ord("#"))
    return numbers


def records(packed, *sizes):
    """Numbers in records of `sizes[0]` numbers; with a second size each ends with a count and so many records of it."""
    numbers, found = iter(unpack(packed)), []
    for first in numbers:
        record = [first, *(next(numbers) for _ in range(sizes[0] - 1))]
        if len(sizes) == 2:
            record.append([[next(numbers) for _ in range(sizes[1])] for _ in range(next(numbers))])
        found.append(record)
    return found


class LspPage:
    """The data of a page of show-lsp."""

    def __init__(self, directory):
        script = (directory / "data.js").read_text(encoding="ascii")
        self.data = json.loads(re.fullmatch(r"window\.LSPS = (.*);\n", script)[1])
        self.lsps = self.data["lsps"]

    def column(self, name, lsp, *sizes):
        """Records of a packed column of an LSP."""
        return records(self.lsps[name][lsp], *sizes)

    def related(self, lsp):
        """LSPs that fire together with one, and its nearest atoms."""
        return {
            "co_firing": [[other, npmi / 100, support] for other, npmi, support in self.column("co_firing", lsp, 3)],
            "nearest": [[other, cosine / 100 - 1] for other, cosine in self.column("nearest", lsp, 2)],
        }

    def lsp(self, lsp):
        """Figures and contexts of an LSP of a store; weights and shares in thousandths."""
        texts, marks, places = self.data["texts"], self._marks(lsp), self._places()
        return self.related(lsp) | {
            "typical": [[texts[text], share] for text, share in self.column("typical", lsp, 2)],
            "profile": unpack(self.lsps["profile"][lsp]),
            "top": [self._context(marks[place][0], dict(marks), places) for place in unpack(self.lsps["top"][lsp])],
            "quantiles": [
                [least, largest, [self._context(marks[place][0], dict(marks), places) for (place,) in some]]
                for least, largest, some in self.column("tenths", lsp, 2, 1)
            ],
        }

    def edits(self, lsp):
        """The words that a probe predicts with an LSP and without it; probabilities in thousandths."""
        numbers, found = iter(unpack(self.lsps["edits"][lsp])), []
        for mark in numbers:
            found.append({"place": self._places()[self._marks(lsp)[mark][0]][:2], "probability": next(numbers)})
            found[-1]["words"] = [
                [[self.data["texts"][next(numbers)], next(numbers), next(numbers)] for _ in range(next(numbers))]
                for _ in range(3)
            ]
        return found

    def _marks(self, lsp):
        """Tokens of the passages that have an LSP, with its weight there."""
        steps, weights = zip(*self.column("marks", lsp, 2), strict=True) if self.lsps["marks"][lsp] else ((), ())
        return list(zip(accumulate(steps), weights, strict=True))

    def _places(self):
        """Of every token of the passages its window, its position and which text it is of."""
        places, window, text = [], 0, -1
        for size, step, position in records(self.data["runs"], 3):
            window, text = window + step, text + (size % 2 == 0)
            places += [(window, position + i, text) for i in range(size // 2)]
        return places

    def _context(self, token, weights, places):
        passages, reach = unpack(self.data["passages"]), self.data["reach"]
        around = [i for i in range(token - reach, token + reach + 1) if 0 <= i < len(places)]
        pieces = [(i, self.data["texts"][passages[i]]) for i in around if places[i][2] == places[token][2]]
        return {
            "place": places[token][:2],
            "weight": weights[token],
            "text": "".join(piece for _, piece in pieces).removeprefix(" "),
            "marked": [(piece.removeprefix(" "), weights[i]) for i, piece in pieces if i in weights],
        }
