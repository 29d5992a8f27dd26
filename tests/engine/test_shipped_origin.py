"""The heads that come with the kit say what their tree was found from, as those of users do."""

from medusa_kit.base.fingerprint import Fingerprint
from medusa_kit.base.origin import BASE, HEADS, STATISTICS, compare
from medusa_kit.cli.prompts import asset
from medusa_kit.heads.checkpoint import read_config, stored_digest
from medusa_kit.tree.plan import read_fields
from medusa_kit.tree.statistics import RankStatistics


def test_trees_and_statistics_are_of_the_heads_beside_them() -> None:
    folders = [path.parent for path in asset("heads").glob("*/config.json")]
    assert folders
    for folder in folders:
        statistics = RankStatistics.load(folder / "statistics.npz")
        now = {HEADS: stored_digest(folder), BASE: read_config(folder).base_fingerprint}
        of_tree = compare(read_fields(folder / "tree.json"), {**now, STATISTICS: statistics.digest})
        for found in (of_tree, compare(statistics.meta, now)):
            assert (found.other, found.unknown) == ({}, [])


def test_other_quantisations_of_their_base_find_them() -> None:
    """Whatever a base is compared with has the digest of its norms and biases."""
    for folder in (path.parent for path in asset("heads").glob("*/config.json")):
        statistics = RankStatistics.load(folder / "statistics.npz")
        said = (
            read_config(folder).base_fingerprint,
            read_fields(folder / "tree.json")[BASE],
            statistics.meta[BASE],
        )
        assert {Fingerprint.parse(each).vectors for each in said} != {None}
        assert len({*said}) == 1
