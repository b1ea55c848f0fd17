"""The built-in task: pairs of sentences made by a seeded generator; do both say the same?

Both sentences of a pair tell of an event in words chosen at random: synonyms, voice and order vary. In half of the
pairs two facts differ: who did it, what was done, where or when. So neither length nor grammar tells, shared words
alone mislead, and a head that has not been trained is near chance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

_PEOPLE = (
    "the nurse", "the pilot", "the farmer", "the lawyer", "the baker", "the engineer", "the teacher", "the painter",
    "the sailor", "the mayor", "the judge", "the student",
)  # fmt: skip

# Participles of one meaning; active sentences take the same word as past tense.
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


@dataclass(frozen=True)
class Event:
    """The facts that a sentence tells; numbers index the tables above."""

    agent: int
    patient: int
    action: int
    place: int
    time: int


def make_pairs(count: int, seed: int) -> list[tuple[str, str, int]]:
    """`count` pairs of sentences, and 1 where both say the same, else 0. The same seed gives the same pairs."""
    generator = random.Random(seed)
    return [_make_pair(generator) for _ in range(count)]


def _make_pair(generator: random.Random) -> tuple[str, str, int]:
    agent, patient = generator.sample(range(len(_PEOPLE)), 2)
    event = Event(agent, patient, *(generator.randrange(len(table)) for table in (_ACTIONS, _PLACES, _TIMES)))
    same = generator.random() < 0.5
    other = event if same else _change_facts(event, generator)
    return _tell(event, generator), _tell(other, generator), int(same)


def _change_facts(event: Event, generator: random.Random) -> Event:
    sizes = {"agent": _PEOPLE, "action": _ACTIONS, "place": _PLACES, "time": _TIMES}
    for field in generator.sample(sorted(sizes), 2):
        taken = {event.agent, event.patient} if field == "agent" else {getattr(event, field)}
        choices = [index for index in range(len(sizes[field])) if index not in taken]
        event = replace(event, **{field: generator.choice(choices)})
    return event


def _tell(event: Event, generator: random.Random) -> str:
    agent, patient = _PEOPLE[event.agent], _PEOPLE[event.patient]
    action, place, time = (
        generator.choice(words) for words in (_ACTIONS[event.action], _PLACES[event.place], _TIMES[event.time])
    )
    core = f"{patient} was {action} by {agent}" if generator.random() < 0.5 else f"{agent} {action} {patient}"
    text = generator.choice((f"{time}, {core} {place}", f"{core} {place} {time}"))
    return text[0].upper() + text[1:] + "."
