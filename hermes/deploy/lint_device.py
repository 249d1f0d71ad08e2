"""Rules about the phone: how the file gets there, and what it takes there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from hermes.deploy.lint import RuleBook
from hermes.deploy.lint_facts import BundleFacts
from hermes.report.wording import size

BOOK = RuleBook()
GB = 10**9
IOS_SECTION = 1 * GB
"""Mappings fail on iOS somewhere above this: 1.28 GB in google-ai-edge/LiteRT-LM#2545, 1.35 GB in
google-ai-edge/mediapipe-samples#393, over 2 GB in LiteRT-LM#2645. No number is documented."""
PLAY_ASSET_PACK = int(1.5 * GB)
"""Compressed download of one asset pack
(https://support.google.com/googleplay/android-developer/answer/9859372)."""
PLAY_TOTAL = 4 * GB
"""All modules and install-time asset packs together (the same page)."""
PHONE_BUDGET = 3 * GB
"""What one app can hope for: an iPhone 13 Pro (6 GB) gave 3.1 GB without entitlements and 4.2 GB
with them (https://github.com/a-ghorbani/pocketpal-ai/pull/651)."""
RUNTIME_BYTES = 60 * 10**6
"""The runtime's library and its buffers for a tiny model."""
_ELEMENT = {"float32": 4, "float16": 2, "int8": 1}


@dataclass(frozen=True)
class DeviceEstimate:
    """What the runtime takes on the device, bytes; the basis is `estimate`'s.

    Attributes:
        weight_cache: the file of packed matrices in the cache folder.
        kv_cache: keys and values of the whole context.
        peak_memory: resident at most, with a cache folder that can be written.
        peak_without_cache: the same without one, when every signature packs matrices of its own.
    """

    weight_cache: int
    kv_cache: int
    peak_memory: int
    peak_without_cache: int

    def to_dict(self) -> dict[str, int]:
        """JSON values."""
        return asdict(self)


def estimate(facts: BundleFacts) -> DeviceEstimate:
    """From sizes alone.

    Measured with LiteRT-LM 0.18.1 on x86-64, resident MB with and without the cache folder:
    SmolLM2-135M by Hermes (168 MB, six signatures) 371 and 970, estimated 480 and 1153; by the
    official exporter (143 MB, two signatures) 355 and 744, estimated 455 and 590. Its weight cache
    took 136.9 MB, the matrices 134.5 MB. Pages of the file count as long as nobody needs them.
    """
    models = sum(section.size for section in facts.sections if section.kind == "TFLiteModel")
    packed = sum(
        4 * math.prod(constant.shape) if constant.unpacked else constant.size
        for constant in facts.constants
        if constant.operator in ("FULLY_CONNECTED", "BATCH_MATMUL")
    )
    cache = 0
    if facts.decode is not None:
        for tensor in facts.decode.cache:
            cache += math.prod(tensor.shape) * _ELEMENT.get(tensor.dtype, 4)
    rest = models + 2 * cache + RUNTIME_BYTES
    signatures = max(1, len(facts.signatures))
    return DeviceEstimate(packed, cache, rest + packed, rest + signatures * packed)


def estimate_lines(found: DeviceEstimate) -> list[str]:
    """The estimate with its basis."""
    return [
        f"on the device, estimated: {size(found.peak_memory)} of memory beside the app (model, "
        f"packed matrices, twice the keys and values of {size(found.kv_cache)}, the runtime), "
        f"{size(found.peak_without_cache)} if the cache folder cannot be written",
        f"and a weight cache of {size(found.weight_cache)} in that folder (the matrices, packed)",
    ]


@BOOK.rule(
    "ios-mapping",
    "warning",
    "The runtime maps a section as one piece. On iOS such mappings fail above roughly 1 GB without "
    "the entitlements, and the error may come only at the first message "
    "(google-ai-edge/LiteRT-LM#2545, #2645).",
    "give the app com.apple.developer.kernel.extended-virtual-addressing and "
    "com.apple.developer.kernel.increased-memory-limit, or use a smaller model",
)
def ios_mapping(facts: BundleFacts) -> Iterator[str]:
    for section in facts.sections:
        if section.size > IOS_SECTION:
            yield f"section {section.kind} has {size(section.size)}"


@BOOK.rule(
    "play-asset-pack",
    "warning",
    "Google Play takes asset packs up to 1.5 GB of compressed download, and weights hardly "
    "compress (support.google.com/googleplay/android-developer/answer/9859372).",
    "let the app download the file itself, or split it over several packs and join them",
)
def play_asset_pack(facts: BundleFacts) -> Iterator[str]:
    if facts.size > PLAY_ASSET_PACK:
        yield f"the file has {size(facts.size)}"


@BOOK.rule(
    "play-total",
    "warning",
    "Google Play takes 4 GB of modules and install-time asset packs in all "
    "(support.google.com/googleplay/android-developer/answer/9859372).",
    "let the app download the file itself",
)
def play_total(facts: BundleFacts) -> Iterator[str]:
    if facts.size > PLAY_TOTAL:
        yield f"the file has {size(facts.size)}"


@BOOK.rule(
    "phone-memory",
    "warning",
    "An app may use about half of a phone's memory before the system ends it without a message.",
    "use a smaller model or a shorter context, and test on the smallest phone you support",
)
def phone_memory(facts: BundleFacts) -> Iterator[str]:
    found = estimate(facts)
    if found.peak_memory > PHONE_BUDGET:
        yield f"it needs about {size(found.peak_memory)}, estimated"
