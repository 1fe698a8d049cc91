"""Grammars for llguidance: output formats, JSON schemas and forced tool calls, and the process that compiles them.

A format of one client may take any time and memory, or overflow the stack, in spite of llguidance's own limits. So a
thread does not do (docs/log.md). The process is ended when a job exceeds its bounds or loses its client, and the next
job starts another one. Jobs and results are JSON, so no object of the process is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import resource
import signal
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import psutil
from llguidance import LLMatcher, LLTokenizer

from coordinator.text.schemas import DEFINITIONS, Json, ToolSchemas
from coordinator.text.side_process import Process, ask, command_of, end, start_process
from mtp.sampling.grammar import grammar_problem, tokenizer_of
from proto.errors import CapacityError, NotReadyError, RequestError
from proto.params import MAX_GRAMMAR_BYTES

if TYPE_CHECKING:  # at run time it would take seconds in the process that compiles grammars
    from mtp.checkpoint.families.family import CallForm


UNFORCED = (
    *("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "propertyNames", "minProperties"),
    *("maxProperties", "dependentRequired", "dependentSchemas"),
)
"""Rules of an object whose properties stand in a fixed order, each once or not at all, that no grammar holds."""


def check_schema(tool: Json, path: str, style: CallForm) -> None:
    """Raise RequestError for a schema of arguments from which no grammar can be built. The compiler checks the rest."""
    function = tool["function"]
    schema = ToolSchemas([tool]).parameters(function["name"])
    for name, kind, noun in (("properties", dict, "an object"), ("required", list, "a list")):
        if not isinstance(schema.get(name, kind()), kind):
            raise RequestError(f"{path}.{name}: {noun} is required", param=f"{path}.{name}")
    if style != "json" and (rules := [name for name in UNFORCED if name in schema]):
        text = f"{path}.{rules[0]}: cannot be forced in this model's form of calls. Use tool_choice auto."
        raise RequestError(text, param=f"{path}.{rules[0]}")
    for name in schema.get("properties", ()) if style != "json" else ():
        if not WRITABLE.fullmatch(name) or name != name.strip():
            text = f"{path}.properties: the name {name!r:.60} cannot be forced. Use tool_choice auto."
            raise RequestError(text, param=f"{path}.properties")
    for name, member in _members(tool):
        if style != "json" and member.get("type") in (None, "string") and "not" in member:
            text = f"{path}.properties.{name}: not cannot be forced for a string. Use tool_choice auto."
            raise RequestError(text, param=f"{path}.properties.{name}")
    check_numbers(schema, path)


WRITABLE = re.compile(r"""[^<>"'\n]{1,200}""")
"""Names of arguments that tags can hold."""


def _members(tool: Json) -> Iterator[tuple[str, Json]]:
    schemas, function = ToolSchemas([tool]), tool["function"]["name"]
    for name in schemas.properties(function):
        for member in schemas.members(function, name):
            yield name, member


def check_numbers(content: Any, path: str) -> None:
    """Raise RequestError for NaN and for numbers that JSON has and a float has not, such as 1e999."""
    try:
        json.dumps(content, allow_nan=False)
    except ValueError as error:
        text = f"{path}: a number is not finite, or an object contains itself. Send finite numbers."
        raise RequestError(text, param=path) from error


FormatKind = Literal["json_schema", "lark", "regex", "choice"]

WHITESPACE = " ?"
"""The whitespace between JSON tokens. More of it has no meaning, and a model may repeat it until the answer's limit."""


@dataclass(frozen=True)
class OutputFormat:
    """The format of an answer. `content` has the type of `kind`; `param` is the client's field, for errors."""

    kind: FormatKind
    content: Any
    param: str


ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The schema of any JSON object."""


def compile_format(output: OutputFormat, tokenizer: LLTokenizer) -> bytes:
    """Return the grammar of a format after a trial of its cost. Blocks. Raises RequestError, naming the field."""
    try:
        grammar = _grammar_text(output)
    except ValueError as error:  # such as too many levels
        raise _refusal(output, str(error)) from error
    if len(grammar) > MAX_GRAMMAR_BYTES:
        raise _refusal(output, f"{len(grammar)} bytes exceed the limit of {MAX_GRAMMAR_BYTES}")
    if problem := grammar_problem(grammar, tokenizer):
        raise _refusal(output, problem)
    return grammar.encode()


def _refusal(output: OutputFormat, problem: str) -> RequestError:
    text = f"{output.param}: the format cannot be compiled: {problem:.400}"
    return RequestError(text, param=output.param)


def _grammar_text(output: OutputFormat) -> str:
    match output.kind:
        case "json_schema":
            options: Any = {"whitespace_pattern": WHITESPACE}
            schema = json.dumps(output.content)
            return str(LLMatcher.grammar_from_json_schema(schema, defaults=options))
        case "lark":
            return str(LLMatcher.grammar_from_lark(str(output.content)))
        case "regex":
            return str(LLMatcher.grammar_from_regex(output.content))
        case "choice":
            choices = " | ".join(map(quoted, output.content))
            return str(LLMatcher.grammar_from_lark(f"start: {choices}"))


MAX_CALLS = 16
"""Maximum number of calls in one forced answer. Without a limit a model may repeat calls until the answer's limit."""


def call_grammar(tools: Sequence[Json], style: CallForm, markers: tuple[str, str], *, single: bool) -> str:
    """Return a Lark grammar of one call of `tools`, in OpenAI's format, or of up to MAX_CALLS, between `markers`."""
    start, end = markers
    tags = {"xml": _ELEMENTS, "pairs": _PAIRS, "invokes": _INVOKES}.get(style)
    line = "" if tags is _PAIRS else "\n"
    rules = [f"call: {quoted(start + line)} ({' | '.join(f'f{i}' for i in range(len(tools)))}) {quoted(end)}"]
    for number, tool in enumerate(tools):
        rule, function = f"f{number}", tool["function"]
        rules += _tagged_call(rule, function, tags) if tags else _json_call(rule, function)
    between = f"{quoted(line)} " if line else ""
    more = "" if single else f" ({between}call){{0,{MAX_CALLS - 1}}}"
    return "\n".join([f"start: call{more}", *rules, *(tags.text_rules if tags else ())])


def _json_call(rule: str, function: Json) -> list[str]:
    parameters = dict(function.get("parameters") or ANY_OBJECT)
    parameters.pop("$schema", None)  # it stands at the root of a schema only
    schema = {
        **_definitions(parameters),
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    return [f"{rule}: {rule}_json {quoted(chr(10))}", f"{rule}_json: {json_rule(schema)}"]


@dataclass(frozen=True)
class _Tags:
    """The tags around a call's name, `function` and its end, and around an argument, `opening` and `closing`.

    `{}` stands for the name. `closing` is an expression as the parser of calls reads it; `after_text` is that of a
    string with rules, with its line break, so that this one is no character of the string. No string has `ends`.
    """

    function: str
    function_end: str
    opening: str
    closing: str
    after_text: str
    ends: str

    @property
    def text_rules(self) -> tuple[str, str]:
        """The rules of a string with the end of its argument."""
        return f"text[suffix={self.closing}]: TEXT", f"TEXT: /(?s:.*)/ & {self.no_ends}"

    @property
    def no_ends(self) -> str:
        """The expression of texts without the end of an argument, function or call."""
        return f"~/(?s:.*)<({self.ends})(?s:.*)/"


_ELEMENTS = _Tags(
    "<function={}>\n",
    "</function>\n",
    "<parameter={}>\n",
    r"/\n?<\/parameter>\n/",
    r"/\n<\/parameter>\n/",
    r"\/(parameter|function|tool_call)>|(parameter|function)[= ]",
)
_PAIRS = _Tags(
    "{}",
    "",
    "<arg_key>{}</arg_key><arg_value>",
    r"/<\/arg_value>/",
    r"/<\/arg_value>/",
    r"\/?(arg_key|arg_value|tool_call)>",
)

_INVOKES = _Tags(
    '<invoke name="{}">\n',
    "</invoke>\n",
    '<parameter name="{}">',
    r"/<\/parameter>\n/",
    r"/<\/parameter>\n/",
    r"\/?(parameter|invoke|minimax:tool_call)[> ]",
)


def _tagged_call(rule: str, function: Json, tags: _Tags) -> list[str]:
    schemas = ToolSchemas([{"function": function}])
    name = function["name"]
    required = schemas.parameters(name).get("required") or ()
    rules, items = [], []
    undeclared = [each for each in required if isinstance(each, str) and each not in schemas.properties(name)]
    for number, argument in enumerate([*schemas.properties(name), *undeclared]):
        item = f"{rule}_p{number}"
        items.append(item if argument in required else f"{item}?")
        found = [
            _tagged_value(f"{item}_v{i}", member, schemas.parameters(name), tags)
            for i, member in enumerate(schemas.members(name, argument))
        ]
        values = ["text"] if any(v == "text" for v, _ in found) else [v for v, _ in found]
        opening = quoted(tags.opening.format(argument))
        rules.append(f"{item}: {opening} ({' | '.join(values)})")
        rules += [extra for _, extras in found for extra in extras]
    opening, end = quoted(tags.function.format(name)), [quoted(tags.function_end)] if tags.function_end else []
    head = f"{rule}: {' '.join([opening, *items, *end])}"
    return [head, *rules]


def _tagged_value(rule: str, member: Json, parameters: Json, tags: _Tags) -> tuple[str, list[str]]:
    """Return the expression of a value that fits `member`, with the end of its parameter, and the rules it uses."""
    kind = member.get("type")
    choices = member.get("enum", [member["const"]] if "const" in member else None)
    if isinstance(choices, list) and kind in (None, "string", "null"):
        fits = [c for c in choices if kind is None or (c is None) == (kind == "null")]
        texts = [c if isinstance(c, str) else json.dumps(c) for c in fits]
        texts = [text for text in texts if _fits(text, string_rules(member))]
        return f"({' | '.join(map(quoted, texts))}) {tags.closing}" if texts else "NOTHING", []
    if kind == "null":
        return f'"null" {tags.closing}', []
    if kind in (None, "string"):
        expressions = string_rules(member)
        if not expressions:
            return "text", []
        name = rule.upper()
        terms = " & ".join(f"/{expression}/" for expression in expressions)
        return rule, [f"{rule}[suffix={tags.after_text}]: {name}", f"{name}: {terms} & {tags.no_ends}"]
    return f"{rule} {tags.closing}", [f"{rule}: {json_rule({**member, **_definitions(parameters)})}"]


def _fits(text: str, rules: Sequence[str]) -> bool:
    with contextlib.suppress(re.error):  # a pattern that Python does not know
        return all(re.fullmatch(rule, text) for rule in rules)
    return True


ANY = "(?s:.*)"

FORMATS = {
    "date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "time": r"[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "email": r"[^@\s]+@[^@\s]+",
    "ipv4": r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
}
FORMATS["date-time"] = f"{FORMATS['date']}T{FORMATS['time']}"


def string_rules(schema: Json) -> list[str]:
    """Return the regular expressions that a string of `schema` fits, all of them. An unknown format is a hint."""
    found = [FORMATS[f] for f in [schema.get("format")] if isinstance(f, str) and f in FORMATS]
    parts = [schema, *(schema.get("allOf") or ())]
    found += [_searched(part["pattern"]) for part in parts if isinstance(part.get("pattern"), str)]
    least, most = schema.get("minLength"), schema.get("maxLength")
    if least or most is not None:
        found.append(f"(?s:.{{{least or 0},{'' if most is None else most}}})")
    return [re.sub(r"(?<!\\)/", r"\/", each).replace("\n", r"\n") for each in found]


_CLASSES = {"d": "[0-9]", "w": "[A-Za-z0-9_]"}


def _searched(pattern: str) -> str:
    """Return the expression of texts in which JSON Schema's `pattern` is found. Anchors hold at the ends of choices."""
    text = re.sub(r"\\(.)", lambda m: "/" if m[1] == "/" else _CLASSES.get(m[1], m[0]), pattern)
    choices = []
    for choice in _choices(text):
        before, after = ANY, ANY
        if choice.startswith("^"):
            choice, before = choice[1:], ""
        if choice.endswith("$") and not choice.endswith("\\$"):
            choice, after = choice[:-1], ""
        choices.append(f"{before}(?:{choice}){after}")
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


def _choices(text: str) -> list[str]:
    """Return the choices of a regular expression, outside of groups and classes."""
    found, depth, in_class, start = [], 0, False, 0
    for token in re.finditer(r"\\.|.", text, re.DOTALL):
        if token[0] == "]":
            in_class = False
        elif in_class or token[0] == "[":
            in_class = True
        elif token[0] in "()":
            depth += 1 if token[0] == "(" else -1
        elif token[0] == "|" and depth == 0:
            found.append(text[start : token.start()])
            start = token.end()
    return [*found, text[start:]]


def _definitions(parameters: Json) -> Json:
    """Return the schemas that references in `parameters` name."""
    return {name: parameters[name] for name in DEFINITIONS if name in parameters}


def json_rule(schema: Json) -> str:
    """Return the expression of a JSON text with a schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def quoted(text: str) -> str:
    """Return the expression of `text`."""
    return json.dumps(text)


JOB_SECONDS = 2.0
"""Seconds. Longest compilation of the format of one request."""

WAIT_SECONDS = 2.0
"""Seconds. Longest wait for the jobs of other requests, after which the client may send its request again."""

START_SECONDS = 30.0
"""Seconds. Deadline of the start. A process reads 250,000 tokens in about 3 s on an idle machine."""

MAX_GROWTH = 256 * 2**20
"""Bytes. Largest growth of the process's memory by one job."""

LOOK_SECONDS = 0.02
"""Seconds between two looks of the process at its memory."""

TOO_LARGE = 3
"""Exit code of a process whose job exceeds MAX_GROWTH."""

MAX_STACK = 4 * 2**20
"""Bytes. Largest stack of the process on Linux: half of that of a stage, which prepares the same grammar."""

OVERFLOWS = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
"""Exit codes of a process whose stack overflowed. llguidance recurses, and none of its limits counts the depth."""

MAX_RESULTS = 64
"""Results kept for requests with the same format, refusals among them: 16 MB of the largest grammars."""


class GrammarProcess:
    """The compiler of output formats for the tokenizer with the packed `vocabulary`. Use it on one event loop."""

    def __init__(self, vocabulary: bytes) -> None:
        self.vocabulary = vocabulary
        self.process: Process | None = None
        """The process that waits for jobs, if one has started."""
        self._results: OrderedDict[bytes, dict[str, str]] = OrderedDict()
        self._turn, self._starting = asyncio.Lock(), asyncio.Lock()

    async def compile(self, outputs: Sequence[OutputFormat]) -> bytes:
        """Return the grammar of the first of `outputs`, or raise RequestError for the first refusal of the others.

        Raises CapacityError if the formats of other requests take too long.
        """
        if not self.vocabulary:
            param = outputs[0].param
            raise RequestError(
                f"{param}: this checkpoint names no end token or has no BPE tokenizer, which formats require.",
                param=param,
            )
        for output in outputs:
            check_numbers(output.content, output.param)
        job = json.dumps([vars(output) for output in outputs]).encode()
        key = hashlib.sha256(job).digest()
        if key not in self._results:
            await self._compile_in_turn(key, job, outputs[0].param)
        self._results.move_to_end(key)
        result = self._results[key]
        if "refusal" in result:
            raise RequestError(result["refusal"], param=result["param"])
        return result["grammar"].encode()

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            end(self.process)
        self.process = None

    async def _compile_in_turn(self, key: bytes, job: bytes, param: str) -> None:
        await self._started()  # the start of the process is no wait for other requests
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._turn.acquire()
        except TimeoutError:
            raise CapacityError(
                "The server compiles the formats of other requests. Try again later.",
                retry_after=WAIT_SECONDS,
            ) from None
        try:
            if key not in self._results:
                self._results[key] = await self._run(job, param)
                if len(self._results) > MAX_RESULTS:
                    self._results.popitem(last=False)
        finally:
            self._turn.release()

    async def _run(self, job: bytes, param: str) -> dict[str, str]:
        """Return a job's result. The process ends above a bound. Raises NotReadyError if it ends without a cause."""
        process = await self._started()
        try:
            async with asyncio.timeout(JOB_SECONDS):
                answer = await ask(process, job + b"\n")
        except TimeoutError:
            bound = f"{JOB_SECONDS:g} s"
        else:
            if answer:
                return dict(json.loads(answer))
            if process.returncode != TOO_LARGE and process.returncode not in OVERFLOWS:
                # The format need not be the cause, so this is no result to keep.
                raise NotReadyError("The compiler of formats has ended. Try again.")
            bound = "the stack" if process.returncode in OVERFLOWS else f"{MAX_GROWTH // 2**20} MiB"
        text = f"{param}: compiling the format takes more than {bound}. Send a smaller format."
        return {"refusal": text, "param": param}

    async def _started(self) -> Process:
        """Return the process, started unless it runs. Raises NotReadyError if it does not start."""
        async with self._starting:
            if self.process is None or self.process.returncode is not None:
                self.process = await self._start()
            return self.process

    async def _start(self) -> Process:
        process, answer = await start_process(command_of(__name__)), b""
        weakref.finalize(self, end, process)
        facts = f"{len(self.vocabulary)} {MAX_GROWTH}\n".encode()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                answer = await ask(process, facts + self.vocabulary)
        if not answer:
            raise NotReadyError("The compiler of formats does not start. Try again later.")
        return process


# ---- in the process


def main() -> None:
    """Compile the jobs of the standard input, one a line, until it ends."""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK if hard < 0 else min(MAX_STACK, hard), hard))
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    length, growth = map(int, jobs.readline().split())
    tokenizer = tokenizer_of(jobs.read(length))
    memory = psutil.Process().memory_info
    least = memory().rss

    def watch() -> None:
        """End this process when a job takes more than `growth` bytes. The compiler lets other threads run."""
        while memory().rss - least <= growth:
            time.sleep(LOOK_SECONDS)
        os._exit(TOO_LARGE)

    threading.Thread(target=watch, daemon=True).start()
    results.write(b"ready\n")
    results.flush()
    for job in jobs:
        signal.alarm(round(3 * JOB_SECONDS))  # ends this process even if its server is gone
        least = memory().rss
        results.write(json.dumps(_result(json.loads(job), tokenizer)).encode() + b"\n")
        results.flush()
        signal.alarm(0)


def _result(job: list[dict[str, Any]], tokenizer: LLTokenizer) -> dict[str, str]:
    """Return the grammar of the first format of a job, or the refusal."""
    refusals = []
    for output in [OutputFormat(**fields) for fields in job]:
        try:
            grammar = compile_format(output, tokenizer).decode()
        except RequestError as error:
            refusals.append({"refusal": str(error), "param": error.param or output.param})
            continue
        if not refusals:
            return {"grammar": grammar}
    return refusals[min(1, len(refusals) - 1)]
