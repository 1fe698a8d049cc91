"""Conversations made from the corpus, which teach the chat format and the end of an answer.

There are four kinds: functions to write, names to explain, code to continue, and tools to call. Every answer is text of
the corpus or follows from the question. No text comes from another model.
"""

import ast
import inspect
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtp.builtin.training.corpus import Document

MIN_ANSWER, MAX_ANSWER = 80, 1_600  # characters; about 25 to 500 tokens
SYSTEM = "You are a helpful assistant."
CITIES = "Paris London Berlin Tokyo Oslo Rome Madrid Vienna Lisbon Prague Dublin Boston Chicago Zurich Athens".split()
ZONES = "UTC CET EST JST PST Europe/Paris Europe/London Asia/Tokyo America/New_York".split()
TOPICS = [
    "csv files",
    "sorting",
    "regular expressions",
    "threads",
    "dates",
    "sockets",
    "decorators",
    "generators",
]
GREETINGS = [
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hi there",
    "Good morning",
    "Hey",
    "Hello there",
    "Who are you?",
    "What are you?",
]
WELCOME = (
    "Hello. I am a small language model of Python source code and its documentation. "
    "Ask me to write a function, to explain a name, or give me code to continue."
)
DIRECTIVE = re.compile(
    r"^\.\. (?:function|class|method|exception|data|attribute|module):: (.+)\n((?:\n|   .*\n)+)",
    re.M,
)


@dataclass(frozen=True)
class Conversation:
    """The arguments of `apply_chat_template`."""

    messages: list[dict[str, Any]]
    tools: list[dict[Any, Any] | Callable[..., Any]] | None = field(default=None)


def _turn(role: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


def _ask(rng: random.Random, question: str, answer: str, thought: str) -> Conversation:
    """Return one question and its answer; half of the answers follow a thought, as with `enable_thinking`."""
    system = [_turn("system", SYSTEM)] if rng.random() < 0.3 else []
    reasoning = thought if rng.random() < 0.5 else ""
    return Conversation(
        [*system, _turn("user", question), _turn("assistant", answer, reasoning_content=reasoning)]
    )


def _fits(text: str) -> bool:
    return MIN_ANSWER <= len(text) <= MAX_ANSWER


def _fence(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


def _code_questions(document: Document, rng: random.Random) -> Iterator[Conversation]:
    try:
        tree = ast.parse(document.text)
    except (
        SyntaxError,
        ValueError,
    ):  # the library's tests and lib2to3 contain invalid files on purpose
        return
    source_lines = document.text.split("\n")  # not splitlines: form feeds do not end a line for ast
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        summary = (ast.get_docstring(node) or "").strip()
        first_line = summary.partition("\n")[0].strip()
        code = inspect.cleandoc("\n" + "\n".join(source_lines[node.lineno - 1 : node.end_lineno]))
        kind = "class" if isinstance(node, ast.ClassDef) else "function"
        if first_line and _fits(code):
            question = f"Write the Python {kind} `{node.name}`: {first_line}"
            yield _ask(
                rng,
                question,
                _fence(code),
                f"The user wants the source of the {kind} `{node.name}`.",
            )
        if first_line and _fits(summary):
            question = rng.choice(["Explain `{}`.", "What does `{}` do?", "What is `{}`?"]).format(
                f"{document.module}.{node.name}" if document.name.count("/") == 0 else node.name
            )
            yield _ask(
                rng,
                question,
                summary,
                f"The user asks about `{node.name}`. I answer with its documentation.",
            )
        lines = code.splitlines()
        if len(lines) >= 8 and _fits(code) and rng.random() < 0.15:
            cut = rng.randrange(3, len(lines) - 3)
            question = "Continue this code:\n" + _fence("\n".join(lines[:cut]))
            yield _ask(
                rng,
                question,
                _fence("\n".join(lines[cut:])),
                f"The user wants the rest of the {kind} `{node.name}`.",
            )


def _doc_questions(document: Document, rng: random.Random) -> Iterator[Conversation]:
    for match in DIRECTIVE.finditer(document.text):
        signature, body = match.group(1).strip(), inspect.cleandoc("\n" + match.group(2)).strip()
        name = signature.partition("(")[0]
        paragraphs = [part for part in body.split("\n\n") if not part.startswith((":", ".."))]
        answer = ""
        for paragraph in paragraphs:  # as many whole paragraphs as fit
            if len(answer) + len(paragraph) > MAX_ANSWER:
                break
            answer = f"{answer}\n\n{paragraph}" if answer else paragraph
        if _fits(answer):
            question = rng.choice(
                ["Explain `{}`.", "What does `{}` do?", "How does one use `{}`?"]
            ).format(name if rng.random() < 0.7 else signature)
            yield _ask(
                rng,
                question,
                answer,
                f"The user asks about `{name}`. I answer with its documentation.",
            )


def _tool(name: str, about: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": schema},
    }


TOOLS = {
    "get_weather": _tool("get_weather", "Get the current weather for a city.", city="string"),
    "get_time": _tool("get_time", "Get the current time in a time zone.", timezone="string"),
    "add": _tool("add", "Add two numbers.", a="number", b="number"),
    "search": _tool("search", "Search the documentation.", query="string"),
}


def _tool_call(rng: random.Random) -> Conversation:
    name = rng.choice(list(TOOLS))
    a, b = rng.randrange(1000), rng.randrange(1000)
    city, zone, topic = rng.choice(CITIES), rng.choice(ZONES), rng.choice(TOPICS)
    question, arguments, result, answer = {
        "get_weather": (
            rng.choice(
                [
                    "What is the weather in {}?",
                    "How is the weather in {}?",
                    "Is it raining in {}?",
                    "Weather in {}?",
                ]
            ).format(city),
            {"city": city},
            f"{a % 30} degrees, " + (sky := rng.choice(["sunny", "rain", "cloudy", "snow"])),
            f"In {city} it is {a % 30} degrees, {sky}.",
        ),
        "get_time": (
            rng.choice(
                ["What time is it in {}?", "Tell me the time in {}.", "What is the time in {}?"]
            ).format(zone),
            {"timezone": zone},
            clock := f"{a % 24:02}:{b % 60:02}",
            f"It is {clock} in {zone}.",
        ),
        "add": (
            rng.choice(["What is {} + {}?", "Add {} and {}."]).format(a, b),
            {"a": a, "b": b},
            f"{a + b}",
            f"The sum is {a + b}.",
        ),
        "search": (
            rng.choice(["Search for {}.", "Find documentation about {}.", "Look up {}."]).format(
                topic
            ),
            {"query": topic},
            f"There is a chapter about {topic}.",
            f"The documentation has a chapter about {topic}.",
        ),
    }[name]
    others = rng.sample(list(TOOLS), k=rng.randrange(1, len(TOOLS) + 1))
    offered = others if name in others else [*others, name]
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    thought = f"I call `{name}`." if rng.random() < 0.5 else ""
    messages = [
        _turn("user", question),
        _turn("assistant", "", reasoning_content=thought, tool_calls=[call]),
    ]
    if rng.random() < 0.4:
        thought = "I have the result." if thought else ""
        messages += [_turn("tool", result), _turn("assistant", answer, reasoning_content=thought)]
    return Conversation(messages, [TOOLS[tool] for tool in offered])


def conversations(documents: Sequence[Document], seed: int) -> list[Conversation]:
    """Return the conversations of `documents`, shuffled; one in eight calls a tool, one in forty is a greeting."""
    rng = random.Random(seed)
    found: list[Conversation] = []
    for document in documents:
        found.extend(
            _code_questions(document, rng) if document.is_source else _doc_questions(document, rng)
        )
    corpus_size = len(found)
    found.extend(_tool_call(rng) for _ in range(corpus_size // 8))
    found.extend(
        _ask(rng, rng.choice(GREETINGS), WELCOME, "The user greets me.")
        for _ in range(corpus_size // 40)
    )
    rng.shuffle(found)
    return found
