"""Records of one line, told apart by its form. Each form is a function that returns the records of a line."""

import re

from trl_steady.report.record import NUMBER, Record, number

_BAR = re.compile(r"\b\d{1,3}%(?:\|[^|\n]*\|)?\s*(\d+)/(\d+) \[")  # pages drop the picture of a bar
_NOTEBOOK_BAR = re.compile(r"\[\s*(\d+)/(\d+) \d+:\d\d[^\]]*\bEpoch\b")
_SET = re.compile(rf", ([A-Za-z][\w/ ]*)=({NUMBER})(?=[,\s]|$)")


def bars(line: str) -> list[Record]:
    """Return the progress bars of a line, of tqdm and of notebooks."""
    found: list[Record] = []
    if "%" in line and "/" in line:
        end = 0
        for match in _BAR.finditer(line):
            label = line[end : match.start()].rpartition("]")[2].strip(" :")
            found.append(Record("bar", label, int(match[1]), {}, int(match[2])))
            end = match.end()
            found += _postfix(line[end:].partition("]")[0], int(match[1]), int(match[2]))
    if "Epoch" in line:
        for match in _NOTEBOOK_BAR.finditer(line):
            found.append(Record("bar", "", int(match[1]), {}, int(match[2])))
    return found


def _postfix(text: str, step: int, last: int) -> list[Record]:
    """Return the record of metrics in a bar, such as `00:12<00:30, 1.2s/it, loss=0.1, reward=0.5, kl=0.01`."""
    values = {name: float(value) for name, value in _SET.findall(text)}
    if len(values) < 3:
        return []
    return [Record("dict", "bar", step, values, last)]


STEP_OF_PAIRS = re.compile(r"\bstep:(\d+)(?: - (?=[\w@./(-]+)|\s*$)")


def pairs(line: str) -> list[Record]:
    """Return the record of a line such as `step:3 - actor/lr:1e-06 - critic/score/mean:0.5`."""
    if "step:" not in line:
        return []
    match = STEP_OF_PAIRS.search(line)
    if match is None:
        return []
    values: dict[str, float] = {}
    for word in line[match.end() :].split():
        name, _, text = word.rpartition(":")
        value = number(text)
        if name and value is not None:
            values[name] = value
    return [Record("pairs", "step", int(match[1]), values)]


_WITH_COMMAS = re.compile(
    r"(?:(?:^|[^\w/])([Ss]tep|[Ii]ter(?:ation)?):? +(\d+)(?:/(\d+))?|\]\((\d+)/(\d+)\))[,:] +([^'\"`]+)"
)


def listed(line: str) -> list[Record]:
    """Return the record of a line such as `Step: 3/40, Loss: 0.1, Reward: 0.5, KL: 0.01` or `[1/1](3/40), ...`."""
    if line.count(", ") < 3:
        return []
    match = _WITH_COMMAS.search(line)
    if match is None:
        return []
    name, step, last, batch, batches, text = match.groups()
    values = _cell_values(text.split(", "))
    if len(values) < 3:
        return []
    return [_record("cells", name or "Batch", step or batch, last or batches or "", values)]


_CELLS = re.compile(r"(?:^|[^\w/])(?<!Micro )[Ss]tep:? +(\d+)(?:/(\d+))? \| ([^'\"`]+)")


def cells(line: str) -> list[Record]:
    """Return the record of a line such as `Step 3 | 22.5s | Reward 0.5000 | Truncation 1.0%`."""
    if "tep" not in line or " | " not in line:
        return []
    found: list[Record] = []
    for match in _CELLS.finditer(line):
        step, last, text = match.groups()
        values = _cell_values(text.split(" | "))
        label = "Timed step" if "Time" in values else "Step"
        found.append(_record("cells", label, step, last or "", values))
    return found


_COUNTED = re.compile(r"^(.*?)(?:^|[\s\]])(\d+)/(\d+) \| ([A-Za-z][\w ]*[=:][^'\"`]+)$")
_OTHER_COUNTS = re.compile(r"epoch|eval|valid|test|sampl|generat|batch", re.IGNORECASE)


def counted_cells(line: str) -> list[Record]:
    """Return the record of a line such as `[math]  3/100 | loss=0.1 | reward=0.5`.

    Other loops count too, such as those over the batches of an evaluation: only one with a loss is training.
    """
    if " | " not in line:
        return []
    match = _COUNTED.search(line)
    if match is None or _OTHER_COUNTS.search(match[1]):
        return []
    _, step, last, text = match.groups()
    values = _cell_values(text.split(" | "))
    if not {"loss", "reward"} <= {name.lower() for name in values}:
        return []
    return [_record("cells", "Step", step, last, values)]


_CELL = re.compile(rf"([A-Za-z][\w./ -]*?)(?:\s*[:=]\s*|\s+)({NUMBER}|nan|inf)(?:(%)|/(\d+))?")
_SECONDS = re.compile(rf"(?:Time:? ?)?\s*(?:(\d+)h)?\s*(?:(\d+)m)?\s*(?:({NUMBER})s)?$")


def _cell_values(texts: list[str]) -> dict[str, float]:
    values: dict[str, float] = {}
    time = _SECONDS.match(texts[0].strip())
    if time is not None and texts[0].strip():
        hours, minutes, seconds = time.groups(default="0")
        values["Time"] = 3600 * int(hours) + 60 * int(minutes) + float(seconds)
        texts = texts[1:]
    for text in texts:
        found = _CELL.match(" ".join(text.split()))
        value = number(found[2]) if found else None
        if found is None or value is None:
            continue
        parts = 1.0
        if found[3]:  # a percent sign
            parts = 100.0
        elif found[4]:  # "2 of 4" as 2/4
            parts = float(found[4]) or 1.0
        values[found[1]] = value / parts if parts != 1 else value
    return values


LINE = re.compile(r"(?:^|\s)step (\d+)/(\d+)  (.+)")
_WORDS = re.compile(rf"(eval_[\w-]+|[A-Za-z][A-Za-z ]*?) ({NUMBER}|nan|inf)(%|x)?$")


def live_line(line: str) -> list[Record]:
    """Return the record of a line such as `step 12/32  reward 0.64  KL 0.076  clipped 4%`."""
    if "step " not in line:
        return []
    match = LINE.search(line)
    if match is None:
        return []
    values: dict[str, float] = {}
    for part in re.split(r"\s{2,}", match[3].strip()):
        found = _WORDS.match(part)
        if found is None:
            continue
        value = float(found[2])
        if found[3] == "%":
            value /= 100
        values[found[1]] = value
    if not values:
        return []
    return [Record("line", "step", int(match[1]), values, int(match[2]))]


_DICT = re.compile(r"(?:([A-Za-z][A-Za-z ]{0,30}?)\s+(\d+)(?:/(\d+))?\s*:\s*)?(\{\s*[\"'][^{}]*)(\}|$|(?=\{))")
_HALF_DICT = re.compile(r"^\s*[\"']?[\w/ ]*[\"']: [^{}]*\}")
_PAIR = re.compile(
    r"([\"'])([^\"'{}]{1,200})\1\s*:\s*"
    r"(\"[^\"]*\"|'[^']*'|[\w.]+\([^()]*\)|[^,}\s]+)"
)


def dicts(line: str) -> list[Record]:
    """Return the records of the dictionaries in a line, as Python or JSON prints them, also of those that are cut.

    A dictionary is a record if most of its values are numbers: configs and answers are not.
    """
    found: list[Record] = []
    if "{" in line:
        for label, step, last, body, end in _DICT.findall(line):
            is_cut = end != "}"
            if is_cut:
                body = body.rpartition(",")[0]  # of the last number, some digits can be lost
            values, strings = _dict_values(body)
            if len(values) > strings:
                found.append(_record("dict", label, step, last, values)._replace(is_cut=is_cut))
    elif "}" in line and _HALF_DICT.match(line):
        values, strings = _dict_values(line)
        if len(values) > max(strings, 2):
            found.append(_record("dict", "", "", "", values))
    return found


def _dict_values(body: str) -> tuple[dict[str, float], int]:
    """Return the numbers of a dictionary, and how many other values it has. "5/60" is a number and "NAME of"."""
    values: dict[str, float] = {}
    others = 0
    for _, name, text in _PAIR.findall(body):
        value = number(text)
        if value is not None:
            values[name] = value
            continue
        place = re.fullmatch(r"[\"']?(\d+)/(\d+)[\"']?", text)
        if place:
            values[name] = float(place[1])
            values[f"{name} of"] = float(place[2])
        elif not re.search(r"\d", text):  # "1m 29s", "0.13%" and lists of numbers do not count
            others += 1
    return values, others


def _record(form: str, label: str, step: str, last: str, values: dict[str, float]) -> Record:
    return Record(form, label.strip(), int(step) if step else None, values, int(last) if last else None)
