"""Pages go to one holder at a time but for those that were entered, and come back; digests cover what came before."""

from __future__ import annotations

import random

import pytest

from skote.runtime.page_list import PageList, page_digests


@pytest.mark.parametrize(("positions", "pages"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_positions_are_rounded_up_to_pages(positions: int, pages: int) -> None:
    assert PageList(9, 4).needed(positions) == pages


def test_no_page_is_held_twice_and_none_is_lost() -> None:
    pages, held, draw = PageList(20, 4), [], random.Random(1)
    for _ in range(500):
        if held and draw.random() < 0.5:
            pages.give(held.pop(draw.randrange(len(held))))
        else:
            held.append(pages.take(draw.randint(0, pages.free)))
        taken = [page for each in held for page in each]
        assert len(taken) == len(set(taken)) == 20 - pages.free
        assert set(taken) <= set(range(20))


class TestDigests:
    @pytest.mark.parametrize(("tokens", "digests"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
    def test_the_page_of_the_last_token_has_none(self, tokens: int, digests: int) -> None:
        assert len(page_digests(range(tokens), 4, "")) == digests

    def test_a_digest_covers_all_tokens_before_it_and_the_salt(self) -> None:
        ids = list(range(13))
        whole = page_digests(ids, 4, "")
        assert len(set(whole)) == 3
        assert page_digests(ids[:9], 4, "") == whole[:2]
        for changed in range(12):
            other = page_digests([*ids[:changed], 99, *ids[changed + 1 :]], 4, "")
            assert [a == b for a, b in zip(other, whole, strict=True)] == [page < changed // 4 for page in range(3)]
        assert not set(whole) & set(page_digests(ids, 4, "salt"))

    def test_the_same_tokens_in_another_place_are_another_page(self) -> None:
        first, second = page_digests([1, 2, 1, 2, 1], 2, "")
        assert first != second


def kept(pages: PageList, *digests: bytes) -> None:
    """Enter a prefix of `digests` and let it go."""
    held = pages.take(len(digests))
    for page, digest in zip(held, digests, strict=True):
        pages.enter(page, digest)
    pages.give(held)


class TestShared:
    def test_what_was_entered_is_found_up_to_the_first_gap(self) -> None:
        pages = PageList(5, 4)
        held = pages.take(3)
        pages.enter(held[0], b"a")
        pages.enter(held[2], b"c")
        assert pages.share([b"a", b"b", b"c"]) == held[:1]
        assert pages.share([b"b"]) == pages.share([]) == ()

    def test_a_page_is_free_when_its_last_holder_is_gone(self) -> None:
        pages = PageList(2, 4)
        (page,) = pages.take(1)
        pages.enter(page, b"a")
        assert pages.share([b"a"]) == pages.share([b"a"]) == (page,)
        free = []
        for _ in range(3):
            pages.give([page])
            free.append(pages.free)
        assert free == [1, 1, 2]
        assert pages.share([b"a"]) == (page,)
        assert pages.free == 1

    def test_blank_pages_go_first_then_the_one_that_was_let_go_first(self) -> None:
        pages = PageList(4, 4)
        kept(pages, b"a")
        kept(pages, b"b")
        kept(pages, b"c")
        pages.give(pages.share([b"a"]))  # used again, and so newer than the others
        pages.take(1)
        assert len(pages.share([b"b"]) + pages.share([b"c"]) + pages.share([b"a"])) == 3

        pages = PageList(3, 4)
        for name in (b"a", b"b", b"c"):
            kept(pages, name)
        pages.give(pages.share([b"a"]))
        pages.take(1)
        assert [len(pages.share([name])) for name in (b"a", b"b", b"c")] == [1, 0, 1]

    def test_a_prefix_goes_from_its_end(self) -> None:
        pages = PageList(3, 4)
        kept(pages, b"a", b"ab", b"abc")
        pages.take(2)
        assert len(pages.share([b"a", b"ab", b"abc"])) == 1

    def test_of_two_that_computed_the_same_the_first_is_found(self) -> None:
        pages = PageList(3, 4)
        first, second = pages.take(2)
        pages.enter(first, b"a")
        pages.enter(second, b"a")
        pages.give([first, second])
        assert pages.share([b"a"]) == (first,)
        assert pages.free == 2


@pytest.mark.parametrize("seed", range(10))
def test_holders_are_counted_none_is_lost_and_what_is_found_is_what_was_entered(seed: int) -> None:
    """Against a model that knows each page's content: a prefix is found only where its pages still hold it."""
    draw = random.Random(seed)
    pages = PageList(12, 2)
    content: dict[int, bytes | None] = {}
    held: list[tuple[int, ...]] = []
    hits = 0
    for _ in range(800):
        if held and draw.random() < 0.45:
            pages.give(held.pop(draw.randrange(len(held))))
        else:
            prompt = [draw.randrange(2) for _ in range(draw.randint(1, 13))]
            digests = page_digests(prompt, 2, "")
            shared = pages.share(digests)
            assert [content[page] for page in shared] == list(digests[: len(shared)])
            hits += len(shared)
            own = pages.needed(len(prompt)) - len(shared)
            if own > pages.free:
                mine_alone = set(shared) - {page for each in held for page in each}
                assert pages.needed(len(prompt)) > pages.free + len(mine_alone)
                pages.give(shared)
                continue
            taken = pages.take(own)
            assert not set(taken) & {page for each in held for page in each}
            content.update(dict.fromkeys(taken))
            held.append(shared + taken)
            for page, digest in list(zip(held[-1], digests, strict=False))[len(shared) :]:
                content[page] = digest
                pages.enter(page, digest)
        assert pages.free == 12 - len({page for each in held for page in each})
    assert hits > 50
