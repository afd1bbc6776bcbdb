"""Chat templates: conversations as text, and which of its characters are answers.

A template is written in jinja, as transformers' tokenizers carry it (tokenizer_config.json,
chat_template.jinja), and rendered in jinja2's sandbox. Answers are the messages with the role
"assistant":

    {% generation %} .. {% endgeneration %}     the template marks them itself
    no such tags                                what an answer adds to the text before it:
        messages up to the answer, with the generation prompt      <|user|>Hi<|assistant|>
        and with the answer                                        <|user|>Hi<|assistant|>Hello<|end|>

The second rule needs a template that writes the beginning of a conversation the same way however it
continues. A template that does not, because it drops the reasoning of earlier answers, say, is
refused. So a conversation of n messages is rendered about n times. The template gets no clock: the
same conversation is the same text every day.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.data.tokenizer_folder import SETTINGS, TEMPLATE
from hybridpar.errors import DataError, shown
from hybridpar.reading import errors_as, read_text

if TYPE_CHECKING:  # imported where it is used: operators and benchmarks run without it
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    from hybridpar.data.tokenizer import Tokenizer

Message = Mapping[str, Any]
Span = tuple[int, int]
"""Characters of a text, half open."""
BEGIN_ANSWER = "\ufdd0"
END_ANSWER = "\ufdd1"
"""Marks around answers in a rendered conversation: code points that Unicode keeps out of texts."""
ASSISTANT = "assistant"
_MARKED = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_MARKS = re.compile(f"[{BEGIN_ANSWER}{END_ANSWER}]")
_MAX_BYTES = 4 << 20
MOST_CHARACTERS = 16 << 20
"""Characters of a rendered conversation, and elements of what a template multiplies: an untrusted
template must not fill the memory."""


class ChatTemplate:
    """Renders conversations.

    Args:
        text: The template.
        name: Its name in errors.
        words: Special tokens by role, such as bos_token, which the template may write.

    Raises:
        DataError: The template is not valid jinja.
    """

    def __init__(self, text: str, name: str, words: Mapping[str, str]):
        from jinja2 import TemplateError

        self.text = text
        self.name = name
        self._words = dict(words)
        self._marks_answers = bool(_MARKED.search(text))
        try:
            self._template = _environment().from_string(text)
        except TemplateError as error:
            raise DataError(f"{name}: is not a valid chat template ({error})") from None

    @staticmethod
    def of(tokenizer: Tokenizer, path: str | Path = "") -> ChatTemplate:
        """Return the template in a file or, without `path`, the tokenizer's own.

        Raises:
            DataError: There is none, or it is damaged.
        """
        words = tokenizer.template_words
        if path:
            with errors_as(DataError, path, "is not a chat template"):
                return ChatTemplate(read_text(Path(path), _MAX_BYTES), str(path), words)
        text = tokenizer.chat_template
        if text is None:
            raise DataError(
                f"{tokenizer.name}: has no chat template (chat_template in {SETTINGS}, or "
                f"{TEMPLATE} beside it); write one there, or set data.chat_template "
                f"(--chat_template of hybridpar preprocess) to a file with one"
            )
        return ChatTemplate(text, f"the chat template of {tokenizer.name}", words)

    @property
    def fingerprint(self) -> str:
        """Return a hash of all that decides on the rendered text besides the conversation."""
        return hashlib.sha256(json.dumps([self.text, self._words]).encode()).hexdigest()[:32]

    def render(self, messages: Sequence[Message], *, tools: Any = None, asks: bool = False) -> str:
        """Return a conversation as text. `asks`: with the generation prompt, which begins an answer.

        Raises:
            DataError: The template refuses the conversation, or fails.
        """
        return self._render(messages, tools, asks).replace(BEGIN_ANSWER, "").replace(END_ANSWER, "")

    def render_marked(self, messages: Sequence[Message], *, tools: Any = None) -> str:
        """Return a conversation as text with its answers between BEGIN_ANSWER and END_ANSWER.

        Raises:
            DataError: The template refuses the conversation or fails, or the answers cannot be found
                in what it writes.
        """
        if self._marks_answers:
            marked = self._render(messages, tools, asks=False)
            marks = _MARKS.findall(marked)
            if marks != [BEGIN_ANSWER, END_ANSWER] * (len(marks) // 2):
                raise DataError(
                    f"{self.name}: has a {{% generation %}} inside of another; put these tags "
                    f"around each answer once"
                )
            return marked
        full = self._render(messages, tools, asks=False)
        pieces = []
        end = 0
        for number, message in enumerate(messages):
            if not _is_answer(message):
                continue
            before = self._render(messages[:number], tools, asks=True)
            is_last = number + 1 == len(messages)
            after = full if is_last else self._render(messages[: number + 1], tools, asks=False)
            if not (after.startswith(before) and full.startswith(after) and len(before) >= end):
                raise DataError(
                    f"{self.name}: writes the conversation before message {number + 1} differently "
                    f"once more messages follow, so that the answer cannot be found in the text. "
                    f"Put {{% generation %}} and {{% endgeneration %}} around answers in the "
                    f"template, or divide the conversation into one for each answer"
                )
            pieces += [full[end : len(before)], BEGIN_ANSWER, full[len(before) : len(after)]]
            pieces.append(END_ANSWER)
            end = len(after)
        return "".join([*pieces, full[end:]])

    def _render(self, messages: Sequence[Message], tools: Any, asks: bool) -> str:
        from jinja2 import TemplateError

        pieces = self._template.generate(
            messages=list(messages), tools=tools, add_generation_prompt=asks, **self._words
        )
        made = []
        length = 0
        try:
            for piece in pieces:
                length += len(piece)
                if length > MOST_CHARACTERS:
                    raise DataError(
                        f"{self.name}: writes more than {MOST_CHARACTERS:,} characters for one "
                        f"conversation; divide the conversation, or correct the template"
                    )
                made.append(piece)
        except TemplateError as error:
            raise DataError(f"{self.name}: refuses the conversation ({error})") from None
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise DataError(f"{self.name}: fails on the conversation ({error})") from None
        except (RecursionError, MemoryError) as error:
            raise DataError(
                f"{self.name}: fails on the conversation ({type(error).__name__})"
            ) from None
        return "".join(made)


def conversation_of(record: object) -> tuple[list[Message], Any]:
    """Return the messages of a record, and the tools that they may call.

    A record has "messages", each with a role and a content; or "prompt" and "answer" (also called
    "completion" or "response"), and maybe "system".

    Raises:
        DataError: The record has neither, or has no answer; says what it lacks.
    """
    if not isinstance(record, dict):
        raise DataError(f"is not an object with messages; it is {shown(record)}")
    tools = record.get("tools")
    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise DataError(f"messages must be a list of messages; it is {shown(messages)}")
        for number, message in enumerate(messages):
            _check_message(message, number)
        if not any(message["role"] == ASSISTANT for message in messages):
            roles = ", ".join(dict.fromkeys(shown(message["role"]) for message in messages))
            raise DataError(
                f'must have an answer, a message with the role "{ASSISTANT}"; its roles are {roles}'
            )
        return messages, tools
    answers = [key for key in ("answer", "completion", "response") if key in record]
    if "prompt" not in record or len(answers) != 1:
        raise DataError(
            f'must have "messages", or "prompt" and "answer"; it has {shown(list(record))}'
        )
    turns = {"user": "prompt", ASSISTANT: answers[0]}
    if record.get("system"):
        turns = {"system": "system", **turns}
    for key in turns.values():
        if not isinstance(record[key], str):
            raise DataError(f"{key} must be text; it is {shown(record[key])}")
    return [{"role": role, "content": record[key]} for role, key in turns.items()], tools


def marked_text(record: object, template: ChatTemplate) -> str:
    """Return the conversation in a record as text, with its answers marked.

    Raises:
        DataError: The record is no conversation, or the template cannot write it, or writes nothing
            of its answers.
    """
    messages, tools = conversation_of(record)
    if any(mark in json.dumps(record, ensure_ascii=False) for mark in (BEGIN_ANSWER, END_ANSWER)):
        raise DataError(
            "contains U+FDD0 or U+FDD1, which Unicode keeps out of texts; remove these characters"
        )
    marked = template.render_marked(messages, tools=tools)
    if not _has_answers(marked, messages):
        raise DataError(
            f"has nothing to learn: {template.name} writes nothing of its answers. They must not be "
            f'empty, and the template must write the content of messages of the role "{ASSISTANT}"'
        )
    return marked


def _has_answers(marked: str, messages: Sequence[Message]) -> bool:
    """Return whether what is marked has any word of the answers.

    A template that reads other keys than the messages have writes their roles and ends alone.
    Templates may leave out parts of answers, such as their reasoning. An answer may have no words,
    but a call of a tool.
    """
    text, spans = split_marks(marked)
    learned = [text[first:last] for first, last in spans]
    contents = [message.get("content") or "" for message in messages if _is_answer(message)]
    words = [word for content in contents for word in content.split()]
    return any(word in piece for word in words for piece in learned) if words else bool(learned)


def _is_answer(message: Message) -> bool:
    return message.get("role") == ASSISTANT


def split_marks(marked: str) -> tuple[str, list[Span]]:
    """Return a rendered conversation without its marks, and the characters of its answers."""
    plain: list[str] = []
    spans: list[Span] = []
    length = 0
    for number, piece in enumerate(_MARKS.split(marked)):
        if number % 2 and piece:  # marks alternate
            spans.append((length, length + len(piece)))
        plain.append(piece)
        length += len(piece)
    return "".join(plain), spans


def _check_message(message: object, number: int) -> None:
    """Check that a message has a role and text. Raises: DataError."""
    where = f"message {number + 1}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f'{where} must have a role, such as "user"; it is {shown(message)}')
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise DataError(f"{where} must have text as its content; it has {shown(content)}")


def _environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with what chat templates use in transformers, except a clock."""
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag {% generation %}, which marks an answer."""

        def __init__(self, environment: Environment):
            super().__init__(environment)
            self.tags = {"generation"}

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            marked = nodes.CallBlock(self.call_method("_mark"), [], [], body)
            return marked.set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN_ANSWER}{caller()}{END_ANSWER}"

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        allowed = {"ensure_ascii", "separators", "sort_keys"}
        if unknown := sorted(options.keys() - allowed):
            raise TemplateError(f"tojson has no option {unknown[0]}")
        return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})

    class Bounded(ImmutableSandboxedEnvironment):
        """A sandbox in which no product fills the memory."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not abs(right) <= 64:
                raise TemplateError(f"the exponent of a power must be at most 64; it is {right}")
            if operator == "*":
                for repeated, count in ((left, right), (right, left)):
                    if isinstance(repeated, Sized) and len(repeated) * count > MOST_CHARACTERS:
                        raise TemplateError(f"a product has more than {MOST_CHARACTERS:,} elements")
            return super().call_binop(context, operator, left, right)

    environment = Bounded(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment
