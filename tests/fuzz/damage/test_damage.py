# SPDX-License-Identifier: Apache-2.0
"""Earlier findings, and some random damaged files of every kind; `make fuzz` reads more."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.campaign import Campaign
from tests.fuzz.damage.damager import CORPUS, KINDS, Damager, load
from tests.fuzz.worker import Worker

FOUND = sorted(CORPUS.glob("*"))
CASES, SEED = 300, 20


@pytest.fixture(scope="module")
def damager(library: Path) -> Iterator[Damager]:
    sanitize = "libasan" in os.environ.get("LD_PRELOAD", "")
    with Worker(library, sanitize=sanitize) as worker, Damager(worker) as made:
        yield made


@pytest.mark.parametrize("path", FOUND, ids=lambda path: path.name)
def test_damaged_models_found_before_give_no_finding(path: Path, damager: Damager) -> None:
    verdict = damager.judge(load(path))
    assert verdict.finding is None, verdict.finding.text


def test_whole_files_are_read(damager: Damager) -> None:
    """An intact sample is read; the only refusal is that the NPU's designs do not support such a small model."""
    for kind in KINDS:
        sample = damager.sample(kind)
        assert sample.matching(KINDS[kind].files), kind
        refusals = damager.read(kind)
        assert [text for text in refusals if "designs have no place" not in text] == [], kind


def test_random_damage_gives_no_finding(damager: Damager) -> None:
    found: list[str] = []
    campaign = Campaign(damager.cases(), damager.judge, lambda _, finding: found.append(finding.text))
    campaign.run(CASES, SEED)
    assert not found
    # Checksums and structure reveal most damage; a damaged weight is only another number, and is read.
    assert campaign.counts["refused"] > CASES / 2
    assert campaign.counts["read"] > CASES / 10
