"""Chat templates that render, raise and keep reasoning as the published ones of each family.

They are written anew. `tests/published/templates/digests.json` has digests of what the published files render, with
their sources, and a test holds these against them. The words around the list of tools are our own.
"""

from __future__ import annotations

from typing import Any

FAMILIES = ("qwen3.5", "qwen3.6", "qwen3.8", "qwen3-next", "glm-5.3-flash")

_XML = r"""
{%- macro text_of(content) -%}
  {%- if content is string %}{{ content }}
  {%- elif content is none or content is undefined %}
  {%- elif content is mapping or content is not iterable %}{{ raise_exception('Unexpected content type.') }}
  {%- else %}{%- for item in content %}
    {%- if 'text' in item %}{{ item.text }}
    {%- elif 'image' in item or 'image_url' in item %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
    {%- else %}{{ raise_exception('Unexpected item type in content.') }}{% endif %}
  {%- endfor %}{% endif %}
{%- endmacro %}
{%- if not messages %}{{ raise_exception('No messages provided.') }}{% endif %}
{%- set effort = '' %}
{%- if FAMILY == 'qwen3.8' and (enable_thinking is undefined or enable_thinking is true) %}
  {%- set level = reasoning_effort | default('xhigh') %}
  {%- if level not in ('xhigh', 'medium', 'low') %}{{ raise_exception('Unexpected reasoning effort') }}{% endif %}
  {%- if level != 'medium' %}{% set effort = 'Effort: ' ~ level %}{% endif %}
{%- endif %}
{%- set system = text_of(messages[0].content) | trim if messages[0].role == 'system' else '' %}
{%- set blank = messages[0].role == 'system' and FAMILY != 'qwen3.8' and not tools %}
{%- if tools or system or effort or blank %}{{ '<|im_start|>system\n' }}
  {%- if effort %}{{ effort ~ ('\n\n' if tools or system else '') }}{% endif %}
  {%- if tools %}{{ '# Tools' }}{% for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
    {{- '\n<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>' }}
    {%- if system %}{{ '\n\n' }}{% endif %}
  {%- endif %}
  {{- system ~ '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(query=-1) %}
{%- for message in messages %}
  {%- set text = text_of(message.content) | trim %}
  {%- set result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
  {%- if message.role == 'user' and not result %}{% set ns.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- if ns.query < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}
  {%- set text = text_of(message.content) | trim %}
  {%- if message.role == 'system' %}
    {%- if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}
  {%- elif message.role == 'user' %}{{ '<|im_start|>user\n' ~ text ~ '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
    {%- set kept = loop.index0 > ns.query or KEPT %}
    {{- '<|im_start|>assistant\n' ~ ('<think>\n' ~ (thought | trim) ~ '\n</think>\n\n' if kept else '') ~ text }}
    {%- for call in message.tool_calls or [] %}
      {{- '\n' if not loop.first else '\n\n' if text else '' }}
      {{- '<tool_call>\n<function=' ~ call.function.name ~ '>\n' }}
      {%- for key, value in call.function.arguments | items %}
        {%- set plain = value is string or (FAMILY == 'qwen3.5' and value is not mapping and value is not sequence) %}
        {{- '<parameter=' ~ key ~ '>\n' ~ (value | string if plain else value | tojson) ~ '\n</parameter>\n' }}
      {%- endfor %}
      {{- '</function>\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' ~ text ~ '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- else %}{{ raise_exception('Unexpected message role.') }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}
  {%- if enable_thinking is defined and enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}
{%- endif %}"""

_KEPT = {
    "qwen3.5": "false",
    "qwen3.6": "(preserve_thinking is defined and preserve_thinking is true)",
    "qwen3.8": "(preserve_thinking is undefined or preserve_thinking is true)",
}

_NEXT = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools %}{{ '<|im_start|>system\n' ~ (system ~ '\n\n' if messages[0].role == 'system' else '') ~ '# Tools' }}
  {%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor %}
  {{- '\n<tool_call>\n{"name": "name", "arguments": {}}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(query=messages | length - 1, found=false) %}
{%- for message in messages %}
  {%- set text = message.content if message.content is string else '' %}
  {%- set result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
  {%- if message.role == 'user' and message.content is string and not result %}
    {%- set ns.query = loop.index0 %}
  {%- endif %}
{%- endfor %}
{%- for message in messages %}
  {%- set text = message.content if message.content is string else '' %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ text ~ '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {%- set thought = message.reasoning_content if message.reasoning_content is string else '' %}
    {%- set kept = loop.index0 > ns.query and (loop.last or thought) %}
    {%- set inside = '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ text.lstrip('\n') %}
    {{- '<|im_start|>assistant\n' ~ (inside if kept else text) }}
    {%- for one in message.tool_calls or [] %}{% set tool_call = one.function %}
      {{- '\n' if text or not loop.first else '' }}
      {{- '<tool_call>\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
      {{- (tool_call.arguments | tojson) ~ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' ~ text ~ '\n</tool_response>' }}
    {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""

_GLM = r"""
{%- macro text_of(content) -%}
  {%- if content is string or content is mapping or content is not iterable %}
    {{- '' if content is none else content }}
  {%- else %}{%- for item in content %}
    {%- set kind = item.type if item is mapping else '' %}
    {%- if item is string %}{{ item }}
    {%- elif kind == 'text' %}{{ item.text }}
    {%- elif kind in ('image', 'image_url') %}{{ '<|begin_of_image|><|image|><|end_of_image|>' }}{% endif %}
  {%- endfor %}{% endif %}
{%- endmacro %}
{%- set effort = reasoning_effort if reasoning_effort in ('low', 'high') else 'max' %}
{{- '[gMASK]<sop><|system|>Reasoning Effort: ' ~ (effort | capitalize) }}
{%- if tools %}{{ '<|system|>\n# Tools\n' }}
  {%- for tool in tools %}{{ (tool.function or tool) | tojson ~ '\n' }}{% endfor %}
  {{- '<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>' }}
{%- endif %}
{%- set ns = namespace(query=-1, results=[]) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
  {%- if message.role in ('system', 'user') %}{{ '<|' ~ message.role ~ '|>' ~ text_of(message.content) }}
  {%- elif message.role == 'assistant' %}
    {%- set whole = text_of(message.content) %}
    {%- set thought = message.reasoning_content %}
    {%- set inside = thought is not string and '</think>' in whole %}
    {%- set thought = whole.split('</think>')[0].split('<think>')[-1] if inside else thought %}
    {%- set kept = thought is string and (not clear_thinking or loop.index0 > ns.query) %}
    {{- '<|assistant|><think>' ~ (thought if kept else '') ~ '</think>' }}
    {{- (whole.split('</think>')[-1] if inside else whole).strip() }}
    {%- for call in message.tool_calls or [] %}{% set function = call.function or call %}
      {{- '<tool_call>' ~ function.name }}
      {%- for key, value in function.arguments.items() %}
        {{- '<arg_key>' ~ key ~ '</arg_key><arg_value>' ~ (value if value is string else value | tojson) }}
        {{- '</arg_value>' }}
      {%- endfor %}
      {{- '</tool_call>' }}
    {%- endfor %}
  {%- elif message.role == 'tool' and (loop.first or loop.previtem.role != 'tool') %}
    {%- set before = loop.previtem if not loop.first and loop.previtem.role == 'assistant' else {} %}
    {%- set ns.results = [] %}
    {%- for result in messages[loop.index0:] %}
      {%- if result.role != 'tool' %}{% break %}{% endif %}
      {%- set ns.results = ns.results + [result] %}
    {%- endfor %}
    {%- set calls = (before.tool_calls or []) | map(attribute='id') | list %}
    {%- set answered = ns.results | map(attribute='tool_call_id') | list %}
    {%- set named = calls | select | unique(true) | list == calls %}
    {%- set named = named and answered | select | unique(true) | list == answered %}
    {{- '<|observation|>' }}
    {%- for id in calls if named and answered | reject('in', calls) | list == [] %}
      {%- for result in ns.results if result.tool_call_id == id %}
        {{- '<tool_response>' ~ text_of(result.content) ~ '</tool_response>' }}
      {%- endfor %}
    {%- else %}{%- for result in ns.results %}
        {{- '<tool_response>' ~ text_of(result.content) ~ '</tool_response>' }}
    {%- endfor %}{% endfor %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"""


def template_of(family: str) -> str:
    """Return the template of one of FAMILIES."""
    if family == "glm-5.3-flash":
        return _GLM
    if family == "qwen3-next":
        return _NEXT
    return _XML.replace("FAMILY", repr(family)).replace("KEPT", _KEPT[family])


_CALLS = [
    {
        "id": "1",
        "type": "function",
        "function": {"name": "f", "arguments": {"a": "x\ny", "b": True}},
    },
    {
        "id": "2",
        "type": "function",
        "function": {"name": "g", "arguments": {"c": [1, None], "d": 2}},
    },
]

_USER, _RESULT = {"role": "user", "content": " Hi "}, {"role": "tool", "content": "18"}
_THOUGHT = {"role": "assistant", "content": "A", "reasoning_content": "\nso\n"}
_CALLING = {"role": "assistant", "content": "", "reasoning_content": "so", "tool_calls": _CALLS}

CONVERSATIONS: dict[str, list[Any]] = {
    "one": [_USER],
    "system": [{"role": "system", "content": " Be short. "}, _USER],
    "empty system": [{"role": "system", "content": ""}, _USER],
    "two turns": [_USER, _THOUGHT, _USER],
    "calls": [_USER, _CALLING, _RESULT, _RESULT, _THOUGHT],
    "calls after text": [_USER, _CALLING | {"content": "Let me see."}, _RESULT],
    "earlier calls": [
        _USER,
        _CALLING,
        _RESULT,
        _THOUGHT,
        _USER,
        _THOUGHT | {"reasoning_content": ""},
    ],
    "late system": [_USER, {"role": "system", "content": "New."}, _USER],
    "no user": [{"role": "system", "content": "Be short."}],
    "developer": [{"role": "developer", "content": "Be short."}, _USER],
    "a result of text": [_USER, {"role": "user", "content": "<tool_response>x</tool_response>"}],
}
"""Conversations on which the templates agree with the published ones."""

GLM_CONVERSATIONS: dict[str, list[Any]] = {
    "results in another order": [_USER, _CALLING, *({**_RESULT, "tool_call_id": i, "content": i} for i in "21"), _USER],
    "a result of another call": [_USER, _CALLING, *({**_RESULT, "tool_call_id": i, "content": i} for i in "23")],
    "thoughts in the text": [_USER, {"role": "assistant", "content": "<think>so</think>\nA"}, _USER],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}],
    "null": [_USER, _CALLING | {"content": None}, {"role": "tool", "content": None}],
}
"""Further ones for GLM, whose template sorts the results of calls."""

VARIABLES: list[Any] = [
    {"reasoning_effort": "medium"},
    {"enable_thinking": False},
    {"reasoning_effort": "medium", "preserve_thinking": True},
    {"reasoning_effort": "medium", "preserve_thinking": False},
    {"reasoning_effort": "high"},
]
"""Variables of templates. The medium effort of Qwen3.8 adds no sentence."""

GLM_VARIABLES: list[Any] = [*VARIABLES, {"reasoning_effort": "low", "clear_thinking": True}]
