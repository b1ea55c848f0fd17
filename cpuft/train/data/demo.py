"""The examples of the demo, which are generated: do both sentences of a pair tell the same event?

Synonyms, voice and word order are random. In half of the pairs two facts differ: agent, action, place or time. So
neither length nor grammar tells the label, shared words alone mislead, and an untrained head is near chance.
"""

from __future__ import annotations

import random

_PEOPLE = (
    "the nurse", "the pilot", "the farmer", "the lawyer", "the baker", "the engineer", "the teacher", "the painter",
    "the sailor", "the mayor", "the judge", "the student",
)  # fmt: skip
# Participles with the same meaning, which are also past tenses, for active sentences.
_ACTIONS = (
    ("called", "phoned"),
    ("helped", "assisted"),
    ("hired", "employed"),
    ("paid", "reimbursed"),
    ("taught", "instructed"),
    ("rescued", "saved"),
    ("praised", "applauded"),
    ("visited", "met"),
)
_PLACES = (
    ("at the station", "in the train station"),
    ("at the market", "in the marketplace"),
    ("in the hospital", "at the clinic"),
    ("at the harbour", "at the port"),
    ("in the library", "among the books"),
    ("at the airport", "near the planes"),
)
_TIMES = (
    ("at noon", "at midday"),
    ("at night", "after dark"),
    ("in winter", "in January"),
    ("in summer", "in July"),
    ("yesterday", "the day before"),
)


def make_pairs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """Return `count` tuples of two sentences and 1 if both tell the same event, else 0; determined by the seed."""
    generator = random.Random(seed)
    return [_make_pair(generator) for _ in range(count)]


def _make_pair(generator: random.Random) -> tuple[str, str, int]:
    tables = {"action": _ACTIONS, "place": _PLACES, "time": _TIMES}
    agent, patient = generator.sample(range(len(_PEOPLE)), 2)
    event = {"agent": agent, "patient": patient} | {
        fact: generator.randrange(len(table)) for fact, table in tables.items()
    }
    other, same = dict(event), generator.random() < 0.5
    for fact in generator.sample(["action", "agent", "place", "time"], 2) if not same else ():
        taken = {agent, patient} if fact == "agent" else {event[fact]}
        size = len(tables.get(fact, _PEOPLE))
        other[fact] = generator.choice([index for index in range(size) if index not in taken])
    return _write_sentence(event, generator), _write_sentence(other, generator), int(same)


def _write_sentence(event: dict[str, int], generator: random.Random) -> str:
    agent, patient = _PEOPLE[event["agent"]], _PEOPLE[event["patient"]]
    action = generator.choice(_ACTIONS[event["action"]])
    place = generator.choice(_PLACES[event["place"]])
    time = generator.choice(_TIMES[event["time"]])
    core = f"{patient} was {action} by {agent}" if generator.random() < 0.5 else f"{agent} {action} {patient}"
    text = generator.choice((f"{time}, {core} {place}", f"{core} {place} {time}"))
    return text[0].upper() + text[1:] + "."
