"""The tables of benchmarks/step.py: step times, and how much of a known link they use."""

from __future__ import annotations

import re
import statistics
from typing import Any

from benchmarks import load
from benchmarks.files import markdown
from benchmarks.hardware import versions
from cluster.hostfile import parse

# Variants that the tables compare with others.
OURS, RAW = "Lightning + HorovodStrategy", "no communication"
ALONE = f"{RAW}, our malloc"
TRAINER = "Lightning, no communication, our malloc"
# Of an Ethernet frame's 1,514 bytes 1,448 are data, after the headers of IPv4 and of TCP with time
# stamps (RFC 7323); the limit of cluster/testbed.py counts them all.
FRAME = 1514 / 1448


def report(results: dict[str, Any]) -> str:
    batch = f", {results['batch']} images" if results["batch"] else ""
    on_gpu = results["device"] == "cuda"
    gpus = f"{', '.join(results['gpus'])}, bf16-mixed, channels_last; " if on_gpu else ""
    head = (
        f"Step time, {results['hosts']} over {results['network']}: {gpus}{results['cpu']}, "
        f"{results['cores']} cores; {versions(results)}. Medians of "
        f"{results['repeats']} interleaved blocks, one thread{batch} a rank"
        + ("." if results["finished"] else "; not all models are there yet.")
        + load.warning(results["busy_before"])
    )
    return f"{head}\n\n{table(results)}{wire(results)}"


def is_ours(variant: str) -> bool:
    return variant == OURS or variant.startswith(("HorovodStrategy", "our buckets"))


def ratio(result: dict[str, Any], variant: str, other: str) -> float:
    """The median of the ratios of two variants' step times in neighbouring blocks."""
    one, two = (result["variants"][name]["block_medians_ms"] for name in (variant, other))
    return statistics.median(a / b for a, b in zip(one, two))


def table(results: dict[str, Any]) -> str:
    """Step times of all models and variants: medians, the range of blocks, ours over each."""
    head = ["model", "variant", "ms a step", "blocks from - to", "ours / this", "cores idle"]
    lines = []
    for model, result in results["models"].items():
        for variant, measured in result["variants"].items():
            blocks, resident = measured["block_medians_ms"], measured["resident_mib_at_blocks"]
            ours_to = f"{ratio(result, OURS, variant):.3f}" if OURS in result["variants"] else ""
            cores = f"{statistics.median(measured['idle_share_of_cores']):.0%}"
            early_steps = measured["steps"] - len(blocks) * (result["steps_per_block"] + 1)
            lines.append([
                model, variant, f"{statistics.median(blocks):.2f}",
                f"{min(blocks):.2f} - {max(blocks):.2f}", ours_to, cores,
                f"{measured['peak_mib']:.0f}",
                f"{early_steps}: {resident[0]:.0f}, {measured['steps']}: {resident[-1]:.0f}",
            ])  # fmt: skip
    return markdown([*head, "peak MiB", "after steps: MiB"], lines)


def wire(results: dict[str, Any]) -> str:
    """How much of a known link's rate the steps use, as a table after an empty line.

    The share of the wire is the time that the frames of gradients need on it, over the step time
    without what no overlap can hide, which is the least step's time off the wire. Empty where
    `network` is no rate in mbit; only models with the variant `ALONE`, which tells how long
    computing takes.
    """
    megabits = re.fullmatch(r"(\d+)mbit", results["network"])
    if not megabits:
        return ""
    hosts = parse(results["hosts"])
    share_memory = len(hosts) > 1 and len({host.slots for host in hosts}) == 1
    head = ["model", "variant", "wire alone, ms", "what nothing overlaps, ms", "least step, ms"]
    lines = []
    for model, result in results["models"].items():
        if not (ALONE in result["variants"] and result["arrivals"]):
            continue
        computing = statistics.median(result["variants"][ALONE]["block_medians_ms"])
        for variant, measured in result["variants"].items():
            if RAW in variant:
                continue
            # Of all ranks, or of hosts whose ranks share memory.
            ring = len(hosts) if share_memory and is_ours(variant) else result["ranks"]
            sent = 2 * (ring - 1) / ring / (2 if variant.endswith(("fp16", "bf16")) else 1)
            byte_ms = sent * FRAME * 8 / (int(megabits[1]) * 1e3)  # for each byte of gradients
            wire_ms = result["gradient_bytes"] * byte_ms
            least_ms = least_step(result["arrivals"], computing, byte_ms)
            unhidden_ms = least_ms - wire_ms
            wire_share = wire_ms / (statistics.median(measured["block_medians_ms"]) - unhidden_ms)
            lines.append([
                model, variant, f"{wire_ms:.1f}", f"{unhidden_ms:.1f}", f"{least_ms:.1f}",
                f"{wire_share:.3f}",
            ])  # fmt: skip
    return "\n\n" + markdown([*head, "of the wire"], lines) if lines else ""


def least_step(arrivals: list[tuple[float, int]], computing_ms: float, byte_ms: float) -> float:
    """The ms of a step that sends each gradient once it is there and the wire is free.

    Args:
        arrivals: shares of computing after which gradients are there, and their bytes.
        byte_ms: for each of these bytes on the wire.
    """
    sent = 0.0  # ms into the step when the wire is free
    for share, size in arrivals:
        sent = max(sent, share * computing_ms) + size * byte_ms
    return sent + (1 - arrivals[-1][0]) * computing_ms
