"""The files beside a tokenizer.json, as transformers writes them: special tokens, settings, the
chat template.

    tokenizer_config.json       special tokens by role, added tokens, settings, maybe the chat
                                template
    special_tokens_map.json     special tokens by role, in older folders
    added_tokens.json           ids of further tokens, in older folders
    generation_config.json      ids that end a generated text
    config.json                 ids that end a generated text, if there is no generation_config.json
    chat_template.jinja, additional_chat_templates/NAME.jinja

A special token comes from tokenizer_config.json (special_tokens_map.json goes before it where it
does in transformers), else from generation_config.json, or from config.json if there is none. A
generated text ends at any of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridpar.errors import DataError, shown
from hybridpar.reading import errors_as, read_json, read_text

if TYPE_CHECKING:  # imported where it is used, as in tokenizer.py
    import tokenizers

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
GENERATION = "generation_config.json"
CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"
_MAX_BYTES = 64 << 20
_MAX_TEMPLATES = 64
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_WITH_IDS = ("bos_token", "eos_token", "pad_token")
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes that use tokenizer.json unchanged."""
_BERT_CLASSES = ("BertTokenizer", "BertTokenizerFast")
_NORMALIZER = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}
"""Settings of BERT's normalizer: the name in `tokenizers`, and the default of its class."""


@dataclass(frozen=True)
class TokenizerFolder:
    """Contents of the files beside a tokenizer.json; empty if there are none.

    `files`: texts that are exported with the tokenizer, by their path in the folder. `settings`:
    tokenizer_config.json. `words`: special tokens by role. `ids`: ids by role, from
    generation_config.json and config.json. `added`: tokens by their text, each with its id and the
    options of tokenizers.AddedToken.
    """

    path: Path = Path()
    files: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    added: Mapping[str, tuple[int, Mapping[str, bool]]] = field(default_factory=dict)

    @staticmethod
    def read(path: Path, *, within: Path | None = None) -> TokenizerFolder:
        """Read the files. Raises: DataError if one is damaged or has values of the wrong form."""
        files = _texts(path, within)
        settings = _plain(path, SETTINGS, within)
        special = _plain(path, SPECIAL, within)
        if "added_tokens_decoder" in settings:  # transformers ignores it then
            special = {}
        sources = {**dict.fromkeys(settings, SETTINGS), **dict.fromkeys(special, SPECIAL)}
        words = {
            role: _word(path / sources[role], role, {**settings, **special}[role])
            for role in ROLES
            if role in sources
        }
        words = {role: word for role, word in words.items() if word}
        ids = _ids(path, GENERATION if (path / GENERATION).is_file() else CONFIG, within)
        if ids and GENERATION not in files:  # config.json is not exported with the tokenizer
            files[GENERATION] = json.dumps(
                {
                    f"{role}_id": found if len(found) > 1 else found[0]
                    for role, found in ids.items()
                },
                indent=1,
            )
        return TokenizerFolder(
            path, files, settings, words, ids, _added(path, settings, set(words.values()), within)
        )

    @property
    def chat_template(self) -> str | None:
        """Return the default chat template: chat_template.jinja, else what tokenizer_config.json has.

        Raises:
            DataError: tokenizer_config.json has something else under chat_template.
        """
        if TEMPLATE in self.files:
            return self.files[TEMPLATE]
        found = self.settings.get("chat_template")
        if isinstance(found, list):  # several by name
            named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
            found = named.get("default")
        if found is not None and not _is_text(found):
            raise self.refused("chat_template", found, "must be a template, as text")
        return found

    def with_chat_template(self, text: str) -> TokenizerFolder:
        """Return the same files with another default chat template."""
        return replace(self, files={**self.files, TEMPLATE: text})

    def honour(self, inner: tokenizers.Tokenizer) -> None:
        """Give a tokenizer the settings and the added tokens that transformers would give it.

        Raises:
            DataError: This tokenizer cannot have one of them.
        """
        self._set_normalizer(inner)
        self._set_prefix_space(inner)
        self._add_tokens(inner)

    def refused(self, key: str, value: object, rule: str, file: str = SETTINGS) -> DataError:
        """Return an error about a setting."""
        return DataError(f"{self.path / file}: {key} = {shown(value)}: {rule}")

    def flag(self, key: str, default: bool | None) -> bool | None:
        """Return a setting that is true or false, or null if its default is. Raises: DataError."""
        value = self.settings.get(key, default)
        if not isinstance(value, bool) and not (value is None and default is None):
            raise self.refused(key, value, "must be true or false")
        return value

    def _set_normalizer(self, inner: tokenizers.Tokenizer) -> None:
        from tokenizers import normalizers

        of_class = self.settings.get("tokenizer_class")
        given = [key for key in _NORMALIZER if key in self.settings or of_class in _BERT_CLASSES]
        if not given or of_class in _GENERIC:
            return
        state = _state(inner.normalizer)
        wanted = {_NORMALIZER[key][0]: self.flag(key, _NORMALIZER[key][1]) for key in given}
        if state.get("type") == "BertNormalizer":
            if any(state[key] != value for key, value in wanted.items()):
                options = {
                    key: value for key, value in {**state, **wanted}.items() if key != "type"
                }
                inner.normalizer = normalizers.BertNormalizer(**options)  # type: ignore[assignment]
            return
        for key, kind in (("do_lower_case", "Lowercase"), ("strip_accents", "StripAccents")):
            if self.settings.get(key) and kind not in {
                part.get("type") for part in _parts(state, "normalizers")
            }:
                raise self.refused(
                    key,
                    True,
                    f"conflicts with the normalizer of {TOKENIZER}, which is not BERT's; set it "
                    f"to false, or save the tokenizer again with transformers",
                )

    def _set_prefix_space(self, inner: tokenizers.Tokenizer) -> None:
        from tokenizers import pre_tokenizers

        wanted = self.flag("add_prefix_space", None)
        state = _state(inner.pre_tokenizer)
        if wanted is None or state.get("add_prefix_space") == wanted:
            return
        if state.get("type") == "ByteLevel":
            options = {
                key: value for key, value in state.items() if key in ("trim_offsets", "use_regex")
            }
            made: Any = pre_tokenizers.ByteLevel(add_prefix_space=wanted, **options)
            inner.pre_tokenizer = made
            return
        parts = [*_parts(state, "pretokenizers"), *_parts(_state(inner.normalizer), "normalizers")]
        begins = any(
            part.get("add_prefix_space")
            or part.get("type") == "Prepend"
            or part.get("prepend_scheme", "never") != "never"
            for part in parts
        )
        if begins != wanted:
            does = "puts a space before a text" if begins else "puts no space before a text"
            raise self.refused(
                "add_prefix_space",
                wanted,
                f"conflicts with {TOKENIZER}, which {does}; set it to {str(begins).lower()}, or "
                f"save the tokenizer again with transformers",
            )

    def _add_tokens(self, inner: tokenizers.Tokenizer) -> None:
        from tokenizers import AddedToken

        for word, (number, options) in sorted(self.added.items(), key=lambda item: item[1][0]):
            if inner.token_to_id(word) is None:
                inner.add_tokens([AddedToken(word, **options)])
            if (found := inner.token_to_id(word)) != number:
                file = SETTINGS if "added_tokens_decoder" in self.settings else ADDED
                raise self.refused(
                    word,
                    number,
                    f"does not match the tokenizer, which gives it the id {found}; ids must "
                    f"have no gaps",
                    file,
                )


def decoder_parts(inner: tokenizers.Tokenizer) -> list[Mapping[str, Any]]:
    """Return the components of a tokenizer's decoder, as tokenizer.json has them."""
    return _parts(_state(inner.decoder), "decoders")


def _texts(path: Path, within: Path | None) -> dict[str, str]:
    """Return the files that are exported with a tokenizer, unchanged."""
    names = [name for name in (SETTINGS, SPECIAL, GENERATION, TEMPLATE) if (path / name).is_file()]
    further = sorted(found.name for found in (path / _TEMPLATES).glob("*.jinja") if found.is_file())
    if len(further) > _MAX_TEMPLATES:
        raise DataError(
            f"{path / _TEMPLATES}: has {len(further)} files; must have at most {_MAX_TEMPLATES}"
        )
    texts = {}
    for name in [*names, *(f"{_TEMPLATES}/{name}" for name in further)]:
        with errors_as(DataError, path / name, "is not a text"):
            texts[name] = read_text(path / name, _MAX_BYTES, within=within)
    return texts


def _plain(path: Path, name: str, within: Path | None = None) -> dict[str, Any]:
    """Return a JSON object; empty if the file does not exist."""
    if not (path / name).is_file():
        return {}
    with errors_as(DataError, path / name, "is not valid JSON"):
        plain = read_json(path / name, _MAX_BYTES, within=within)
    if not isinstance(plain, dict):
        raise DataError(f"{path / name}: must be a JSON object, not a {type(plain).__name__}")
    return plain


def _word(file: Path, role: str, value: Any) -> str:
    """Return a special token, which may be written with its options; "" if it is null."""
    word = value.get("content") if isinstance(value, dict) else value
    if word is not None and not _is_text(word):
        raise DataError(
            f'{file}: {role} = {shown(value)}: must be a token, such as "</s>", or null'
        )
    return str(word or "")


def _is_text(value: Any) -> bool:
    """Return whether a value is text that UTF-8 can encode: JSON can also write half a surrogate
    pair."""
    return isinstance(value, str) and not any(
        "\ud800" <= character <= "\udfff" for character in value
    )


def _ids(path: Path, name: str, within: Path | None) -> dict[str, tuple[int, ...]]:
    """Return the ids that a file names, by role."""
    plain = _plain(path, name, within)
    found = {}
    for role in _WITH_IDS:
        value = plain.get(f"{role}_id")
        numbers: list[Any] = []
        if value is not None:
            numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise DataError(
                f"{path / name}: {role}_id = {shown(value)}: must be an id, a list of them, or null"
            )
        if numbers:
            found[role] = tuple(numbers)
    return found


def _added(
    path: Path, settings: Mapping[str, Any], special: set[str], within: Path | None
) -> dict[str, tuple[int, dict[str, bool]]]:
    """Return added tokens by their text."""
    decoder = settings.get("added_tokens_decoder", {})
    found: dict[str, tuple[int, dict[str, bool]]] = {}
    names = "single_word", "lstrip", "rstrip", "normalized", "special"
    for number, token in decoder.items() if isinstance(decoder, dict) else [("", decoder)]:
        if (
            not isinstance(token, dict)
            or not _is_text(token.get("content"))
            or not str(number).isdecimal()
        ):
            raise DataError(
                f"{path / SETTINGS}: added_tokens_decoder has {shown(number)}: {shown(token)}; "
                f"must map ids to tokens with their content"
            )
        found[token["content"]] = (
            int(number),
            {name: bool(token[name]) for name in names if name in token},
        )
    for word, number in _plain(path, ADDED, within).items():
        if not isinstance(number, int) or isinstance(number, bool) or not _is_text(word):
            raise DataError(
                f"{path / ADDED}: {shown(word)} = {shown(number)}: must be a text and its id"
            )
        found.setdefault(
            word, (number, {"normalized": word not in special, "special": word in special})
        )
    return found


def _state(part: Any) -> dict[str, Any]:
    """Return a normalizer or pre-tokenizer as tokenizer.json has it; empty if there is none."""
    return dict(json.loads(part.__getstate__())) if part is not None else {}


def _parts(state: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    """Return a normalizer or pre-tokenizer as a list of its components."""
    return list(state.get(key, [])) if state.get("type") == "Sequence" else [state]
