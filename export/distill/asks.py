"""Questions about logs, and requests without one, composed at random from parts."""

from __future__ import annotations

from random import Random

from headrace.export.distill import words


def _one(random: Random, *pools: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(random.choice(pool) for pool in pools)


def questions(random: Random) -> str:
    """What an operator may ask about the extract of a log that stands before the question."""
    event, other, thing, log = _one(
        random, words.EVENTS, words.EVENTS, words.THINGS, words.LOG_NAMES
    )
    noun, audience, limit = _one(random, words.NOUNS, words.AUDIENCES, words.LIMITS)
    keys = ", ".join(random.sample(words.JSON_KEYS, random.randrange(2, 5)))
    number = random.randrange(2, 12)
    ask = random.choice(
        (
            f"Summarise {log} for {audience}.", f"List every {event} in {log}.",
            f"Which {thing} reports the most lines about a {event}?", f"How many times does a {event} occur?",
            f"Return each {event} in {log} as JSON with the keys {keys}.", f"What happened in {log}?",
            f"When did the first {event} happen, and when the last?", f"Is there any {event} in {log}?",
            f"What should {audience} watch after {log}?", f"Explain {log} to {audience}.",
            f"Which {thing} had a {event} and then a {other}?", f"What led to the {event} in {log}?",
            f"Count the {event} lines per {thing}.", f"Does any {noun} in {log} look abnormal?",
            f"Name the {number} most important lines of {log}.", f"Write a handover note from {log}.",
            f"Group {log} by {thing} and describe each group.", f"How long did each {event} last?",
            f"Which ids belong to a {event} that never ended?", f"Was the {noun} affected by the {event}?",
            f"Write a regular expression that matches each {event} in {log}.",
            f"Make a table of {keys} for each {event}.", f"What is the {thing} of line {number}?",
        )
    )  # fmt: skip
    return f"{ask} {limit}" if random.random() < 0.85 else f"{limit} {ask}"


def request(random: Random) -> str:
    """What anyone may ask an assistant, without a log."""
    topic, other, audience, limit = _one(
        random, words.TOPICS, words.TOPICS, words.AUDIENCES, words.LIMITS
    )
    language, program, units = _one(random, words.LANGUAGES, words.PROGRAMS, words.CONVERSIONS)
    unit, target = units.split("/")
    number, amount = random.randrange(3, 11), random.randrange(2, 2000)
    ask = random.choice(
        (
            f"Explain {topic} to {audience}.", f"What is {topic}, and what is it good for?",
            f"Write a short story about {topic} and {other}.", f"Compare {topic} with {other}.",
            f"Write a letter to {audience} about {topic}.", f"Write a mail that asks {audience} about {topic}.",
            f"Write an instruction for {audience} on how to deal with {topic}.",
            f"What goes wrong most often with {topic}?", f"List {number} facts about {topic}.",
            f"How do I explain the difference between {topic} and {other} to {audience}?",
            f"Give {number} tips to {audience} who has to do with {topic}.",
            f"Write a poem of {number} lines about {topic}.", f"How would {audience} describe {topic}?",
            f"Convert {amount} {unit} to {target}.", f"Write a function in {language} that {program}.",
            f"Write a program in {language} that {program}, and explain it to {audience}.",
            f"Write {number} quiz questions with answers about {topic}.", f"What has {topic} to do with {other}?",
            f"Write a dialogue between {audience} and an expert on {topic}.",
            f"Make a checklist of {number} steps about {topic}.",
            f"Describe {topic} as JSON with {number} fields.", f"Why does {topic} matter to {audience}?",
        )
    )  # fmt: skip
    return f"{ask} {limit}" if random.random() < 0.8 else ask
