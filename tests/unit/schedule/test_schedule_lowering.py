"""Lowering passes on random valid programs: what is added, where, and in which order on the two ends."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st
from schedule_emulator import SEEDS, programs, unhurried

from parallel3d.schedule.builders import from_lists, gpipe, interleaved, one_f_one_b
from parallel3d.schedule.instructions import COMPUTE_OPS, Instruction, Op, Program
from parallel3d.schedule.lowering import (
    add_communication,
    add_gradient_reduction,
    add_loads,
    add_replica_reduction,
    lower,
)
from parallel3d.schedule.order import validate

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)


def texts(program: Program) -> list[str]:
    return [" ".join(map(str, instructions)) for instructions in program.instructions]


def message(i: Instruction) -> tuple[str, int, int] | None:
    """(what, the chunk that needs it, micro-batch) of either end of a transfer."""
    needs = {
        Op.SEND_ACTIVATION: ("activation", i.chunk + 1),
        Op.RECV_ACTIVATION: ("activation", i.chunk),
        Op.SEND_GRADIENT: ("gradient", i.chunk - 1),
        Op.RECV_GRADIENT: ("gradient", i.chunk),
    }
    return (*needs[i.op], i.micro_batch) if i.op in needs else None


def computes(program: Program) -> list[list[Instruction]]:
    return [[i for i in instructions if i.op in COMPUTE_OPS] for instructions in program.instructions]


def test_communication_of_two_stages_literally() -> None:
    assert texts(add_communication(one_f_one_b(2, 2))) == [
        "F0@0 SA0@0 RG0@0 F1@0 SA1@0 RG1@0 B0@0 B1@0",
        "RA0@1 F0@1 RA1@1 B0@1 SG0@1 F1@1 B1@1 SG1@1",
    ]


def test_neighbouring_chunks_on_one_stage_hand_over_locally() -> None:
    assert texts(lower(gpipe(1, 1, 2))) == ["L0@0 F0@0 L0@1 F0@1 B0@1 B0@0"]
    assert texts(lower(gpipe(2, 1, 2, "v"))) == [
        "RA0@3 L0@0 F0@0 SA0@0 L0@3 F0@3 RG0@0 B0@3 SG0@3 B0@0",
        "RA0@1 F0@1 RG0@2 F0@2 SA0@2 B0@2 B0@1 SG0@1",
    ]


def test_a_receiver_posts_in_the_senders_order_though_it_needs_another() -> None:
    program = from_lists([["F0@0", "F1@0", "B0@0", "B1@0"], ["F1@1", "F0@1", "B0@1", "B1@1"]], (0, 1))
    assert texts(add_communication(program))[1].startswith("RA0@1 RA1@1 F1@1 F0@1 B0@1 SG0@1")
    validate(program)


@unhurried
@given(programs())
def test_transfers_are_those_that_the_placement_needs_each_with_both_ends(program: Program) -> None:
    lowered = add_communication(program)
    where, last = program.placement, program.num_chunks - 1
    needed = Counter()
    for m in range(program.num_micro_batches):
        for c in range(last):
            if where[c] != where[c + 1]:
                needed["activation", c + 1, m, where[c], where[c + 1]] += 1
                needed["gradient", c, m, where[c + 1], where[c]] += 1
    sent, received = Counter(), Counter()
    for rank, instructions in enumerate(lowered.instructions):
        for i in instructions:
            if (text := message(i)) is None:
                continue
            what, chunk, m = text
            source = chunk - 1 if what == "activation" else chunk + 1
            ends = (where[source], where[chunk])
            sends = i.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)
            assert rank == ends[0 if sends else 1]
            (sent if sends else received)[(what, chunk, m, *ends)] += 1
    assert sent == needed
    assert received == needed
    assert computes(lowered) == [list(i) for i in program.instructions]


@unhurried
@given(programs())
def test_both_ends_of_a_channel_list_its_messages_in_one_order(program: Program) -> None:
    lowered = add_communication(program)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, instructions in enumerate(lowered.instructions):
        for i in instructions:
            if (text := message(i)) is not None:
                what, chunk, _ = text
                if i.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT):
                    sent[rank, program.placement[chunk]].append(text)
                else:
                    source = chunk - 1 if what == "activation" else chunk + 1
                    received[program.placement[source], rank].append(text)
    assert sent == received


@unhurried
@given(programs())
def test_a_send_stands_right_behind_its_compute_and_a_receive_before_its_consumer(program: Program) -> None:
    for instructions in lower(program).instructions:
        place = {i: k for k, i in enumerate(instructions)}
        for k, i in enumerate(instructions):
            if i.op is Op.SEND_ACTIVATION:
                assert instructions[k - 1] == Instruction(Op.FORWARD, i.chunk, i.micro_batch)
            elif i.op is Op.SEND_GRADIENT:
                assert instructions[k - 1].op in BACKWARDS
                assert (instructions[k - 1].chunk, instructions[k - 1].micro_batch) == (i.chunk, i.micro_batch)
            elif i.op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT):
                ops = (Op.FORWARD,) if i.op is Op.RECV_ACTIVATION else BACKWARDS
                consumers = [place.get(Instruction(op, i.chunk, i.micro_batch)) for op in ops]
                (consumer,) = (c for c in consumers if c is not None)
                # Posted ahead: a compute instruction runs between, unless there is none before the consumer.
                between = any(j.op in COMPUTE_OPS for j in instructions[k + 1 : consumer])
                assert k < consumer
                assert between or not any(j.op in COMPUTE_OPS for j in instructions[:k])


@unhurried
@given(programs())
def test_the_first_and_the_last_chunk_load_right_before_each_forward(program: Program) -> None:
    loads = []
    for instructions in add_loads(add_communication(program)).instructions:
        for k, i in enumerate(instructions):
            if i.op is Op.LOAD_MICRO_BATCH:
                loads.append((i.chunk, i.micro_batch))
                assert instructions[k + 1] == Instruction(Op.FORWARD, i.chunk, i.micro_batch)
    ends = {0, program.num_chunks - 1}
    assert sorted(loads) == [(c, m) for c in sorted(ends) for m in range(program.num_micro_batches)]


@unhurried
@given(programs(), SEEDS)
def test_reductions_stand_right_behind_the_last_backward_of_their_chunk(program: Program, seed: int) -> None:
    rng = random.Random(seed)
    num_buckets = [rng.randrange(4) for _ in program.placement]
    reduced = add_gradient_reduction(lower(program), num_buckets)
    for instructions in reduced.instructions:
        for chunk in {i.chunk for i in instructions if i.op in COMPUTE_OPS}:
            ends = [k for k, i in enumerate(instructions) if i.chunk == chunk and i.op.value in "BW"]
            buckets = [(k, i.bucket) for k, i in enumerate(instructions) if i.chunk == chunk and i.bucket is not None]
            assert buckets == [(ends[-1] + 1 + b, b) for b in range(num_buckets[chunk])]
            assert all(instructions[k].micro_batch == instructions[ends[-1]].micro_batch for k, _ in buckets)
    assert computes(reduced) == computes(program)
    validate(reduced)


@unhurried
@given(programs(), st.lists(st.lists(st.integers(0, 7), min_size=2, max_size=4), max_size=4))
def test_replicas_are_reduced_in_one_order_on_all_owners_behind_everything(
    program: Program, drawn: list[list[int]]
) -> None:
    owners = [tuple(sorted({c % program.num_chunks for c in chunks})) for chunks in drawn]
    lowered = lower(program)
    reduced = add_replica_reduction(lowered, owners)
    for rank, instructions in enumerate(reduced.instructions):
        held = [b for b, chunks in enumerate(owners) if rank in {program.placement[c] for c in chunks}]
        tail = instructions[len(lowered.instructions[rank]) :]
        assert instructions[: len(lowered.instructions[rank])] == lowered.instructions[rank]
        assert [i.bucket for i in tail] == held
        # One instruction for all owners: whoever takes part names it by the same words.
        last = program.num_micro_batches - 1
        assert list(tail) == [Instruction(Op.REDUCE_REPLICAS, owners[b][0], last, b) for b in held]
    validate(reduced)


def test_all_passes_literally() -> None:
    program = add_replica_reduction(add_gradient_reduction(lower(one_f_one_b(2, 1)), [2, 1]), [(0, 1)])
    assert texts(program) == [
        "RG0@0 L0@0 F0@0 SA0@0 B0@0 RED0@0#0 RED0@0#1 REP0@0#0",
        "RA0@1 L0@1 F0@1 B0@1 RED0@1#0 SG0@1 REP0@0#0",
    ]
    validate(program)


def test_all_passes_on_an_interleaved_schedule_validate() -> None:
    program = add_gradient_reduction(lower(interleaved(4, 6, 3)), [2] * 12)
    validate(add_replica_reduction(program, [(0, 11), (0, 5, 11)]))
