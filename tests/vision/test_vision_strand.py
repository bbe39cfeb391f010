"""When images are encoded, shared, held and let go, step by step."""

import pytest
from support.image_world import ROW_BYTES, ImageWorld
from support.schedulers import make_scheduler

from plait.platform.errors import BadRequest, ImageTooLarge, Unsupported


def world(**options):
    """Rows of images: k0 has 1, k1 and k2 have 4, k4 has 9, k5 has 17."""
    return ImageWorld(**{"sizes": ((None, 100),), "budget": 64, **options})


def test_images_of_all_requests_are_encoded_together_and_each_once():
    w = world(max_step_rows=100)
    for layout in ([1, "k1", 2], ["k1", 3, "k4", 1], [1, "k2", 3, "k1"]):
        w.ask(layout)
    w.step()
    assert w.tower.calls == [["k1", "k4", "k2"]]
    figures = w.strand.figures
    assert (figures["encoder_misses"], figures["encoder_hits"]) == (3, 2)
    assert figures["image_rows"] == 25
    w.drain()
    w.ask([3, 3, "k4", 3])
    w.drain()
    assert len(w.tower.calls) == 1
    assert w.strand.figures["encoder_hits"] == 3


def test_a_chunk_ends_before_an_image_that_has_no_room_in_this_step():
    w = world(max_step_rows=8)
    first, second = w.ask([1, "k1", 2])[0], w.ask([1, 2, "k4", 2])[0]
    text = w.ask([3, 3, 3])[0]
    w.step()
    assert w.tower.calls == [["k1"]]
    assert (first.num_output_tokens, second.num_computed_tokens) == (1, 2)
    assert text.num_output_tokens == 1
    w.step()  # larger than a step's rows: it runs alone
    assert w.tower.calls == [["k1"], ["k4"]]
    assert second.num_output_tokens == 1
    w.drain()


def test_a_span_is_whole_even_beyond_the_steps_budget():
    w = world(budget=4, bidirectional="image")
    one = w.ask([1, "k5", 2], max_tokens=1)[0]
    other = w.ask([1, 2, 3], max_tokens=1)[0]
    assert w.step().num_rows == 4  # up to the span, and the other prompt
    assert (one.num_computed_tokens, other.finish_reason) == (1, "length")
    assert w.step().num_rows == 17
    assert one.num_computed_tokens == 18
    w.drain()


def test_two_that_need_the_whole_cache_have_it_one_after_the_other():
    w = world(capacity=17 * ROW_BYTES, budget=5, max_num_seqs=2)
    one, other = w.ask([1, "k5", 2])[0], w.ask([3, "k4", 2])[0]
    w.drain()
    assert one.num_preemptions == other.num_preemptions == 0
    assert w.tower.calls == [["k5"], ["k4"]]
    assert w.strand.figures["encoder_evictions"] == 1


def test_an_image_is_held_while_a_sequence_is_inside_it_and_found_again_after_parking():
    w = world(budget=5, max_num_seqs=1, caching=False)
    one = w.ask([1, "k5", 2], priority=1)[0]
    w.step()
    w.step()
    assert one.num_computed_tokens == 10
    assert len(w.strand._held) == 1
    w.ask([3, 3], priority=0, max_tokens=2)
    w.step()
    assert one.num_preemptions == 1
    assert not w.strand._held
    w.drain()
    assert w.tower.calls == [["k5"]]


def test_an_image_beyond_the_cache_is_refused_with_the_numbers():
    w = world(capacity=16 * ROW_BYTES)
    with pytest.raises(ImageTooLarge, match=r"17 embeddings of 16 bytes, 272 in all, .* 256: "):
        w.ask([1, "k5"])
    w = world(capacity=16 * ROW_BYTES, bidirectional="prefix")
    with pytest.raises(ImageTooLarge, match="belong together 18 embeddings"):
        w.ask(["k4", "k4", 1])
    assert not w.scheduler.num_unfinished


def test_image_tokens_without_an_image_are_refused():
    w = world()
    with pytest.raises(BadRequest, match="0 images are not where its image tokens stand"):
        w.add([1, 11, 2])


def test_without_the_strand_images_are_refused_and_nobody_is_asked():
    w = world()
    plain = make_scheduler((None, 10))
    assert not plain._strands._fitting
    request = w.ask([1, "k1", 2])[0].request
    with pytest.raises(Unsupported, match="takes no images"):
        plain.add(request, seed=1, max_total_tokens=10)
