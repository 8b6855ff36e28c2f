"""Sense-annotated miniatures on disk, and the diagnostic of specs/evaluation.md section 1 once more, slow and plain.

The slow one shares no code with mlsm/evaluation/studies/word_senses: ElementTree, dicts and loops, dense codes.
"""

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

SETS = ("semeval2007", "senseval3", "senseval2", "semeval2013", "semeval2015")
INDEX = """\
bank%1:14:00:: 08420278 1 20
bank%1:17:01:: 09213565 2 25
bank%2:40:00:: 02343595 1 2
big%3:00:01:: 01382086 1 263
big%5:00:00:important:00 01275562 2 20
dog%1:05:00:: 02084071 1 42
great%5:00:00:important:00 01275562 1 14
slope%1:17:00:: 09437454 1 4
well%4:02:00:: 00011093 1 70
"""
TRAINING = [
    "the bank|bank|NOUN|bank%1:14:00:: lends money",
    "a dog|dog|NOUN|dog%1:05:00:: sat on the bank|bank|NOUN|bank%1:17:01::,bank%1:14:00:: of the river",
    "a big|big|ADJ|big%3:00:01:: dog|dog|NOUN|dog%1:05:00:: runs",
    "nobody is annotated here",
    "a great|great|ADJ|great%5:00:00:important:00 man sleeps well|well|ADV|well%4:02:00:: ,",
]
TESTS = [
    "they walk along the bank|bank|NOUN|bank%1:17:01:: of it",
    "he banks|bank|VERB|bank%2:40:00:: there",
    "a big_day|big|ADJ|big%5:00:00:important:00 and a slope|slope|NOUN|slope%1:17:00::",
    "all is well|well|ADV|well%4:02:00:: , dog|dog|NOUN|dog%1:05:00::",
    "my bank|bank|NOUN|bank%1:14:00:: pays a big|big|ADJ|big%3:00:01::,big%5:00:00:important:00 fee",
]


def write_miniature(root):
    """The directory that --data-dir takes, with TRAINING as SemCor and one of TESTS a set."""
    (root / "wordnet3.0").mkdir(parents=True)
    (root / "wordnet3.0" / "index.sense").write_text(INDEX)
    write_set(root / "Training_Corpora/SemCor/semcor", TRAINING)
    for name, sentence in zip(SETS, TESTS, strict=True):
        write_set(root / f"Evaluation_Datasets/{name}/{name}", [sentence])
    return root


def write_set(base, sentences):
    """Sentences of words; an annotated word is text|lemma|pos|keys, its spaces written as underscores."""
    base.parent.mkdir(parents=True)
    lines, gold = ['<?xml version="1.0" encoding="UTF-8" ?>', '<corpus lang="en">', '<text id="d0">'], []
    for s, sentence in enumerate(sentences):
        lines.append(f'<sentence id="d0.s{s}">')
        for w, word in enumerate(sentence.split()):
            text, *annotation = word.split("|")
            if not annotation:
                lines.append(f'<wf lemma="x" pos="X">{escape(text)}</wf>')
                continue
            lemma, pos, keys = annotation
            text, number = escape(text.replace("_", " ")), f"d0.s{s}.t{w}"
            lines.append(f'<instance id="{number}" lemma={quoteattr(lemma)} pos="{pos}">{text}</instance>')
            gold.append(f"{number} {keys.replace(',', ' ')}")
        lines.append("</sentence>")
    base.with_name(base.name + ".data.xml").write_text("\n".join([*lines, "</text>", "</corpus>"]))
    base.with_name(base.name + ".gold.key.txt").write_text("\n".join(gold) + "\n")


def write_part(real, root, training, test):
    """The first sentences of the real data, so many of SemCor and so many of each set."""
    (root / "wordnet3.0").mkdir(parents=True)
    (root / "wordnet3.0" / "index.sense").symlink_to(real / "wordnet3.0" / "index.sense")
    for name in ("Training_Corpora/SemCor/semcor", *(f"Evaluation_Datasets/{name}/{name}" for name in SETS)):
        sentences = training if "SemCor" in name else test
        base = root / name
        base.parent.mkdir(parents=True)
        with open(real / f"{name}.data.xml", encoding="utf-8") as file:
            xml = file.read(1_000_000)
        kept = xml.split("</sentence>")[:sentences]
        text = "</sentence>".join([*kept, "\n</text>\n</corpus>"])
        base.with_name(base.name + ".data.xml").write_text(text, encoding="utf-8")
        ids = set(re.findall(r'<instance id="([^"]*)"', text))
        gold = (real / f"{name}.gold.key.txt").read_text().splitlines()
        kept = [line for line in gold if line.split()[0] in ids]
        base.with_name(base.name + ".gold.key.txt").write_text("\n".join(kept) + "\n")
    return root


def plain_vectors(directory, sentences, layers, center_Pd=None):
    """Vectors (layers, words, d) of annotated words from the full model of transformers, a sentence at a time.

    The words are split by transformers' own hand. Row p of center_Pd is subtracted from the token at position p, the
    last row from all tokens behind it.
    """
    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    model, tokenizer = AutoModel.from_pretrained(directory).eval(), AutoTokenizer.from_pretrained(directory)
    found = []
    for words, instances in sentences:
        encoding = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        with torch.inference_mode():
            states = model(**encoding, output_hidden_states=True).hidden_states
        for instance in instances:
            places = [i for i, word in enumerate(encoding.word_ids()) if word == instance.place]
            means = 0 if center_Pd is None else torch.tensor(center_Pd[np.minimum(places, len(center_Pd) - 1)])
            vectors = [
                (states[layer][0, places] - means).mean(0) if places else torch.zeros(model.config.hidden_size)
                for layer in layers
            ]
            found.append([(vector / max(vector.norm(), 1e-12)).numpy() for vector in vectors])
    return np.array(found).transpose(1, 0, 2)


# -- the slow diagnostic -----------------------------------------------------------------------------------


def instances_of(base):
    """Annotated words in order: dicts of id, lemma, pos, gold, and the sentence's words with the word's place."""
    gold = {line.split()[0]: line.split()[1:] for line in Path(f"{base}.gold.key.txt").read_text().splitlines()}
    found = []
    for sentence in ElementTree.parse(f"{base}.data.xml").iter("sentence"):
        words = ["".join(element.itertext()).strip() for element in sentence]
        for place, element in enumerate(sentence):
            if element.tag == "instance":
                facts = {name: element.get(name) for name in ("id", "lemma", "pos")}
                found.append(facts | {"gold": gold[element.get("id")], "words": words, "place": place})
    return found


def all_instances(root):
    """Those of SemCor, and a dict of set to its own."""
    training = instances_of(root / "Training_Corpora/SemCor/semcor")
    return training, {name: instances_of(root / f"Evaluation_Datasets/{name}/{name}") for name in SETS}


def slow_candidates(root):
    """(lemma, letter) to [(sense number, key, synset)], and key to synset."""
    candidates, synset_of = {}, {}
    for line in (root / "wordnet3.0/index.sense").read_text(encoding="utf-8").splitlines():
        key, offset, number, _ = line.split()
        kind = int(key.split("%")[1][0])
        synset_of[key] = f"{offset}-{'nvars'[kind - 1]}"
        candidates.setdefault((key.split("%")[0], "nvara"[kind - 1]), []).append((int(number), key, synset_of[key]))
    return {word: sorted(senses) for word, senses in candidates.items()}, synset_of


def slow_npmi(phi):
    """{(synset, lsp): mass} to {(synset, lsp): NPMI}."""
    total, rows, columns = sum(phi.values()), {}, {}
    for (i, j), mass in phi.items():
        rows[i] = rows.get(i, 0) + mass
        columns[j] = columns.get(j, 0) + mass
    return {
        (i, j): math.log(total * mass / (rows[i] * columns[j])) / -math.log(mass / total)
        for (i, j), mass in phi.items()
    }


def slow_phi(training, training_codes, synset_of, normalise):
    """{(synset, lsp): mass} over the training words."""
    phi = {}
    for word, code in zip(training, training_codes, strict=True):
        code = {j: float(value) for j, value in enumerate(code) if value > 0}
        total = sum(code.values()) if normalise else 1.0
        for key in word["gold"]:
            for j, value in code.items():
                phi[synset_of[key], j] = phi.get((synset_of[key], j), 0.0) + value / total
    return phi


def slow_answer(word, code, npmi, rule, candidates):
    """(whether right, whether no candidate had evidence)."""
    letter = {"NOUN": "n", "VERB": "v", "ADJ": "a", "ADV": "r"}[word["pos"]]
    best, answer, evidence = None, None, False
    for _, key, synset in candidates[word["lemma"], letter]:
        score = 0.0
        for j, value in enumerate(code):
            if value > 0:
                cell = npmi.get((synset, j), -1.0 if rule == "npmi-1" else 0.0)
                cell = max(cell, 0.0) if rule == "nppmi" else cell
                score += float(value) * cell
                evidence = evidence or (synset, j) in npmi and (rule != "nppmi" or cell > 0)
        if best is None or score > best:
            best, answer = score, key
    return answer in word["gold"], not evidence


def slow_diagnostic(root, codes_of):
    """{variant: {group: F1, "back_off": share}}.

    codes_of  function from "training" or a set's name to the dense codes of its annotated words
    """
    training, tests = all_instances(root)
    candidates, synset_of = slow_candidates(root)
    scores = {}
    for name, normalise in (("raw", False), ("normalised", True)):
        npmi = slow_npmi(slow_phi(training, codes_of("training"), synset_of, normalise))
        for rule in ("npmi0", "nppmi", "npmi-1"):
            answers = []
            for group, words in tests.items():
                for word, code in zip(words, codes_of(group), strict=True):
                    answers.append((group, word["pos"], *slow_answer(word, code, npmi, rule, candidates)))
            names = ("ALL", *SETS, "NOUN", "VERB", "ADJ", "ADV")
            groups = {g: [a for a in answers if g in ("ALL", *a[:2])] for g in names}
            scores[f"{name}-{rule}"] = {
                g: sum(a[2] for a in kept) / len(kept) if kept else None for g, kept in groups.items()
            } | {"back_off": sum(a[3] for a in answers) / len(answers)}
    return scores
