"""KV between pools: places for it, the pieces that leave, and what their landing makes possible."""

import functools

from pdjax.core.books import Books
from pdjax.core.config import Role
from pdjax.core.events import Chunk, Hold, Reuse, Send, SendFailed
from pdjax.core.lives import give_loan_back, lose, release_swap, settle
from pdjax.core.policies.transfer import Leaving, Piece
from pdjax.core.state import Instance, Tracked


def tokens_with_room(role: Role, t: Tracked) -> int:
    """Tokens that it must have pages for before it decodes in an instance of `role`."""
    most = t.request.cache_len
    return min(t.length + max(role.growth, role.steps), most) if role.growth else most


# --- places in decode pools -------------------------------------------------------------------


def find_places(b: Books) -> None:
    """Pages in a decode pool for those that wait for them, oldest first."""
    while b.unplaced:
        t = b.requests[b.unplaced[0]]
        decoder = b.route_decode(t, functools.partial(_accepts, b, t))
        if decoder is None:
            return
        b.unplaced.popleft()
        _place(b, t, decoder)


def _accepts(b: Books, t: Tracked, d: Instance) -> bool:
    """Those whom an instance swapped out come before new ones."""
    full = b.transfer.credits and d.landing >= b.transfer.credits
    full = full or (b.pulls and d.landing >= d.free_slots)  # it fetches what it has a slot for
    if not (d.up and d.takes_decodes) or d.swapped or full or b.claimed(d, t):
        return False
    blocks = t.blocks[: _blocks(b, t.length)]
    tokens = tokens_with_room(d.role, t)
    # What is shared may lie amid the only run of a slab.
    return d.pool.can_hold(tokens, blocks, b.now_ns) or bool(blocks and d.pool.can_hold(tokens))


def _blocks(b: Books, tokens: int) -> int:
    return tokens // b.cache.block if b.cache.prefix else 0


def _place(b: Books, t: Tracked, decoder: Instance) -> None:
    assign(t, decoder)
    t.target = b.hold(decoder, t, tokens_with_room(decoder.role, t), _blocks(b, t.length))
    assert t.target is not None, "can_hold said that there is room"
    decoder.landing += 1
    t.credit = True
    t.skip = t.target.shared * decoder.pool.page_size
    if t.skip:
        b.emit(Reuse(t.rid, decoder.name, t.skip, "target"))
    send_unsent(b, t)
    hand_over(b, t)  # there may be nothing to send


def assign(t: Tracked, decoder: Instance) -> None:
    t.decode = decoder
    decoder.add_member(t.rid)
    t.decode_tokens = t.request.max_tokens - t.text_tokens
    decoder.add_tokens(output=t.decode_tokens)


def stay(b: Books, t: Tracked) -> None:
    """It will decode where it is prefilled: its pages there are the ones that it needs."""
    if t.rid in b.unplaced:
        b.unplaced.remove(t.rid)
    t.unsent.clear()
    t.target = t.source
    assign(t, t.prefill)
    hand_over(b, t)


# --- pieces that leave -------------------------------------------------------------------------


def leaving(b: Books, t: Tracked, chunk: Chunk) -> Leaving:
    """Pieces that leave because of a chunk: none where nothing is decoded, or in place."""
    if not t.decodes or t.in_place:
        return Leaving()
    return b.schedule(chunk, b.transfer.groups)


def hand_off(b: Books, t: Tracked, piece: Piece) -> Piece | None:
    """The part of a piece that the target pool does not have."""
    end = piece.start + piece.length
    start = max(piece.start, t.skip)
    return piece._replace(start=start, length=end - start) if start < end else None


def send_unsent(b: Books, t: Tracked) -> None:
    if t.target is None or t.leaving:
        return
    for piece in t.unsent:
        wanted = hand_off(b, t, piece)
        if wanted is not None:
            b.emit(send_on(b, t, wanted))
    t.unsent.clear()


def send_on(b: Books, t: Tracked, piece: Piece) -> Send:
    groups = b.transfer.groups
    return b.send(t, piece, t.prefill.name, t.decode.name, "hand_off", groups)


def leave_now(b: Books, t: Tracked, pieces: tuple[Piece, ...]) -> None:
    """Pieces of what is computed leave at once, or as soon as there is a place for them."""
    if t.leaving or t.in_place or not pieces:
        return
    t.unsent += pieces
    if t.target is None and t.rid not in b.unplaced:  # it may have lost its place meanwhile
        b.by_age(b.unplaced, t.rid)
    send_unsent(b, t)


# --- pieces that land, or do not ------------------------------------------------------------------


def landed(b: Books, send_id: int) -> None:
    purpose = b.flying[send_id].purpose if send_id in b.flying else ""
    t = b.landed(send_id)
    if t is None:
        return  # told twice, or after it was given up
    if t.leaving:
        settle(b, t)
    elif purpose == "hand_off":
        hand_over(b, t)
    elif not t.flying:
        {"load": end_load, "swap_out": _swapped_out, "swap_in": _swapped_in}[purpose](b, t)


def send_failed(b: Books, event: SendFailed) -> None:
    purpose = b.flying[event.send].purpose if event.send in b.flying else ""
    t = b.landed(event.send)
    if t is None:
        return
    if t.leaving:
        settle(b, t)
    elif purpose == "load":
        lose_load(b, t)
    else:
        lose(b, t, event.why)


def hand_over(b: Books, t: Tracked) -> None:
    """Once all KV is in the target pool the source is free and decoding may begin; streaming, it
    may begin when the first layer group is there."""
    if t.leaving or t.target is None or not (t.arrived or _may_join(b, t)):
        return
    if t.arrived:
        if t.source is not None and not t.in_place:
            b.publish(t.decode, t.target, t, t.length)
            b.release(t.source)
        t.source = None
    b.wake(t.decode)
    if not t.seated:
        t.seated = True
        t.decode.ready.append(t.rid)


def _may_join(b: Books, t: Tracked) -> bool:
    flying = t.flying.values()
    return b.streaming and t.prefilled and not t.unsent and all(send.group for send in flying)


# --- a prefix from another pool ------------------------------------------------------------------


def begin_load(b: Books, t: Tracked) -> bool:
    """Fetches the cached beginning of the text from the pool that has most of it, if that is more
    than its own pool has."""
    if not (b.cache.prefix and b.cache.remote and t.blocks):
        return False
    blocks = t.blocks[: _blocks(b, t.length - 1)]
    others = [i for i in b.instances.values() if i.up and i.pool is not t.prefill.pool]
    counts = [i.pool.cached(blocks, b.now_ns) for i in others]
    most = max(counts, default=0)
    tokens = most * b.cache.block
    if tokens <= t.reused:
        return False
    t.lender, t.load_lost = others[counts.index(most)], False
    t.loan = t.lender.pool.pin(t.rid, blocks[:most], b.now_ns)
    b.emit(Hold(t.loan))
    groups = b.transfer.groups
    for group in range(groups):
        piece = Piece(t.reused, tokens - t.reused, group)
        b.emit(b.send(t, piece, t.lender.name, t.prefill.name, "load", groups))
    t.prefill.loading[t.rid] = None
    return True


def end_load(b: Books, t: Tracked) -> None:
    """What was loaded need not be computed; where it did not come, it is computed."""
    if not t.load_lost:
        tokens = len(t.loan.pages) * t.lender.pool.page_size
        b.emit(Reuse(t.rid, t.prefill.name, tokens - t.reused, "remote"))
        skip_to(t, tokens)
        b.publish(t.prefill, t.source, t, tokens)
    give_loan_back(b, t)
    del t.prefill.loading[t.rid]
    b.by_age(t.prefill.prompts, t.rid)
    b.wake(t.prefill)


def lose_load(b: Books, t: Tracked) -> None:
    """Nothing is lost with it but time. The loan stays until nothing reads it any more."""
    if not t.load_lost:
        t.load_lost = True
        b.cancel_flying(t)
    if not t.flying:
        end_load(b, t)


def skip_to(t: Tracked, tokens: int) -> None:
    """Tokens before this are in the pool where the text is computed."""
    t.reused = t.dispatched = t.computed = tokens
    t.owe(t.length - tokens)


# --- host memory ----------------------------------------------------------------------------------


def _swapped_out(b: Books, t: Tracked) -> None:
    b.release(t.target)
    t.target = None
    b.by_age(t.decode.swapped, t.rid)


def swap_in(b: Books, instance: Instance) -> None:
    """Those swapped out come back, oldest first, when there are pages and a slot for them."""
    while instance.swapped and instance.free_slots > len(instance.ready):
        t = b.requests[instance.swapped[0]]
        room = max(instance.role.growth, instance.role.steps)
        tokens = min(t.stored + 1 + room, t.request.cache_len)
        t.target = b.hold(instance, t, tokens, blocks=0)
        if t.target is None:
            return
        instance.swapped.popleft()
        piece = Piece(0, t.stored, 0)
        here = instance.name
        b.emit(b.send(t, piece, f"{here}.host", here, "swap_in", groups=1))


def _swapped_in(b: Books, t: Tracked) -> None:
    release_swap(b, t)
    hand_over(b, t)
