"""Code that loads one bundle in an app, with the bundle's own facts filled in.

The Python one runs in a test. Kotlin and Swift follow the sources of LiteRT-LM at the time of
writing (kotlin/java/com/google/ai/edge/litertlm/Config.kt and Conversation.kt, swift/Config.swift
and Engine.swift); no compiler of either was at hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hermes.deploy.lint_device import estimate
from hermes.deploy.lint_facts import BundleFacts
from hermes.deploy.lint_tokenizer import opened
from hermes.errors import UsageError
from hermes.report.wording import size

TESTED_RUNTIME = "0.18.1"
_TAG_LENGTH = 12
_SHOWN_STOPS = 4


@dataclass(frozen=True)
class AppFacts:
    """What an app must know of a bundle.

    Attributes:
        path: as given on the command line.
        context: tokens of a whole conversation.
        stops: what ends an answer, for a comment; the runtime takes it from the bundle.
        has_template: the bundle says how a conversation becomes a prompt.
        system: system message, "" for none.
        tag: part of the content's hash, for the cache folder.
        memory: estimate for a comment.
    """

    path: Path
    context: int
    stops: str
    has_template: bool
    system: str
    tag: str
    memory: str


def app_facts(path: Path, facts: BundleFacts, system: str, digest: str) -> AppFacts:
    """Collect them.

    Args:
        digest: hexadecimal hash of the content.
    """
    prompt = facts.prompt
    return AppFacts(
        path=path,
        context=facts.context,
        stops=_stops(facts),
        has_template=prompt is not None and bool(prompt.chat_template or prompt.prompt_affixes),
        system=system,
        tag=digest[:_TAG_LENGTH],
        memory=size(estimate(facts).peak_memory),
    )


def snippet(language: str, facts: AppFacts) -> str:
    """The code.

    Raises:
        UsageError: not one of `LANGUAGES`.
    """
    if language not in LANGUAGES:
        raise UsageError(f"no snippet for {language}", expected=f"one of {', '.join(LANGUAGES)}")
    template, quote = LANGUAGES[language]
    lines = {
        "FILE": facts.path.name,
        "FILE_TEXT": quote(facts.path.name),
        "PATH_TEXT": quote(str(facts.path.resolve())),
        "CLASS": _class_name(facts.path.stem),
        "CONTEXT": str(facts.context),
        "STOPS": facts.stops,
        "TAG": facts.tag,
        "MEMORY": facts.memory,
        "RUNTIME": TESTED_RUNTIME,
        "SYSTEM_TEXT": quote(facts.system),
    }
    text = _chosen(template, "system", bool(facts.system))
    text = _chosen(text, "template", facts.has_template)
    return re.sub(r"@(\w+)@", lambda found: lines[found[1]], text)


def _chosen(text: str, name: str, wanted: bool) -> str:
    """Keep or drop the lines that begin with `?name ` or `!name ` (for its absence)."""
    kept = []
    for line in text.splitlines(keepends=True):
        for mark, keep in (("?", wanted), ("!", not wanted)):
            if line.startswith(f"{mark}{name} "):
                line = line.removeprefix(f"{mark}{name} ") if keep else ""
        kept.append(line)
    return "".join(kept)


def _stops(facts: BundleFacts) -> str:
    tokenizer = opened(facts)
    found = []
    for rule in () if facts.prompt is None else facts.prompt.stop_tokens:
        if isinstance(rule, str):
            found.append(json.dumps(rule))
        elif tokenizer is None or any(not 0 <= i < tokenizer.vocab_size for i in rule):
            found.append(str(list(rule)))
        else:
            spelling = "".join(tokenizer.piece(token) for token in rule)
            found.append(f"{', '.join(map(str, rule))} ({json.dumps(spelling)})")
    more = [] if len(found) <= _SHOWN_STOPS else [f"{len(found) - _SHOWN_STOPS} more"]
    return ", ".join(found[:_SHOWN_STOPS] + more)


def _class_name(stem: str) -> str:
    words = re.findall(r"[A-Za-z0-9]+", stem)
    name = "".join(word[0].upper() + word[1:] for word in words) + "Model"
    return name if name[0].isalpha() else f"A{name}"


def _escaped(text: str, control: Callable[[int], str], extra: str = "") -> str:
    out = []
    for letter in text:
        if letter in '\\"' or letter in extra:
            out.append("\\" + letter)
        elif letter == "\n":
            out.append("\\n")
        else:
            out.append(letter if letter.isprintable() else control(ord(letter)))
    return f'"{"".join(out)}"'


def _kotlin(text: str) -> str:
    def control(code: int) -> str:
        units = chr(code).encode("utf-16-be")
        return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))

    return _escaped(text, control, "$")


def _swift(text: str) -> str:
    return _escaped(text, lambda code: f"\\u{{{code:x}}}")


_ANDROID = """\
// @FILE@: context @CONTEXT@ tokens, stops at @STOPS@, needs about @MEMORY@ of memory.
// app/build.gradle.kts (Hermes is tested with LiteRT-LM @RUNTIME@):
//   implementation("com.google.ai.edge.litertlm:litertlm-android:latest.release")
import android.content.Context
import com.google.ai.edge.litertlm.Backend
?system import com.google.ai.edge.litertlm.Contents
import com.google.ai.edge.litertlm.Conversation
import com.google.ai.edge.litertlm.ConversationConfig
import com.google.ai.edge.litertlm.Engine
import com.google.ai.edge.litertlm.EngineConfig
import com.google.ai.edge.litertlm.SamplerConfig
import java.io.File
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.map

class @CLASS@(context: Context) : AutoCloseable {
    private val engine = Engine(
        EngineConfig(
            modelPath = File(context.filesDir, @FILE_TEXT@).path,
            backend = Backend.CPU(),
            maxNumTokens = @CONTEXT@,
            // Named after the content: a new model never meets the packed weights of an old one.
            cacheDir = File(context.cacheDir, "litertlm-@TAG@").apply { mkdirs() }.path,
        )
    )

    /** Takes seconds: call it once, on a background dispatcher. */
    fun load() = engine.initialize()

!template     // This bundle has no chat template: messages reach the model as they are.
    fun talk(): Conversation = engine.createConversation(
        ConversationConfig(
?system             systemInstruction = Contents.of(@SYSTEM_TEXT@),
            samplerConfig = SamplerConfig(topK = 40, topP = 0.95, temperature = 0.8),
        )
    )

    /** The answer, piece by piece. After cancelProcess() or an error use a new conversation. */
    fun answer(conversation: Conversation, text: String): Flow<String> =
        conversation.sendMessageAsync(text).map { it.toString() }

    override fun close() = engine.close()
}
"""

_IOS = """\
// @FILE@: context @CONTEXT@ tokens, stops at @STOPS@, needs about @MEMORY@ of memory.
// Package https://github.com/google-ai-edge/LiteRT-LM, product LiteRTLM (tested: @RUNTIME@).
import Foundation
import LiteRTLM

final class @CLASS@ {
  private let engine: Engine

  init() throws {
    // The file is part of the app, or was downloaded to the folder of application support.
    guard let model = Bundle.main.path(forResource: @FILE_TEXT@, ofType: nil) else {
      throw CocoaError(.fileNoSuchFile)
    }
    // Named after the content: a new model never meets the packed weights of an old one.
    let cache = FileManager.default.urls(for: .cachesDirectory, in: .userDomainMask)[0]
      .appendingPathComponent("litertlm-@TAG@")
    try FileManager.default.createDirectory(at: cache, withIntermediateDirectories: true)
    engine = Engine(
      engineConfig: try EngineConfig(
        modelPath: model, backend: .cpu(), maxNumTokens: @CONTEXT@, cacheDir: cache.path))
  }

  /// Takes seconds: call it once.
  func load() async throws { try await engine.initialize() }

!template   // This bundle has no chat template: messages reach the model as they are.
  func talk() async throws -> Conversation {
    try await engine.createConversation(
      with: ConversationConfig(
?system         systemMessage: Message(@SYSTEM_TEXT@),
        samplerConfig: try SamplerConfig(topK: 40, topP: 0.95, temperature: 0.8)))
  }

  /// The answer, piece by piece. After an error use a new conversation.
  func answer(_ text: String, in conversation: Conversation) async throws {
    for try await piece in conversation.sendMessageStream(Message(text)) {
      print(piece.toString, terminator: "")
    }
  }
}
"""

_PYTHON = """\
# @FILE@: context @CONTEXT@ tokens, stops at @STOPS@.
# Needs `pip install litert-lm-api==@RUNTIME@`; usage: python this_file.py "Your message" ...
import sys
from pathlib import Path

import litert_lm

MODEL = @PATH_TEXT@
# Named after the content: a new model never meets the packed weights of an old one.
CACHE = Path.home() / ".cache" / "litertlm-@TAG@"
CACHE.mkdir(parents=True, exist_ok=True)

engine = litert_lm.Engine(
    MODEL,
    backend=litert_lm.Backend.CPU(),
    max_num_tokens=@CONTEXT@,
    cache_dir=str(CACHE),
)
!template # This bundle has no chat template: messages reach the model as they are.
?system system = [{"role": "system", "content": @SYSTEM_TEXT@}]
?system with engine.create_conversation(messages=system) as conversation:
!system with engine.create_conversation() as conversation:
    for message in sys.argv[1:]:
        for piece in conversation.send_message_async(message):
            print("".join(part["text"] for part in piece.to_json()["content"]), end="", flush=True)
        print()
"""

LANGUAGES: dict[str, tuple[str, Callable[[str], str]]] = {
    "android": (_ANDROID, _kotlin),
    "ios": (_IOS, _swift),
    "python": (_PYTHON, repr),
}
