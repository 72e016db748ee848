"""Some fifty ways to break the KV cache, the scheduler and the core: what a tired engineer might write.

Each is (file under wicore_trt, text that is there once, text in its place). Whoever moves the code moves the case with
it; a case whose text is gone fails loudly.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    caught_by: str = "campaign"
    """"campaign", or test files of the default suite, separated by spaces."""


MUTANTS = (
    # --- device pages: references, publication, windows
    Mutant(
        "kv/pool.py",
        "            self._references[slot] -= 1\n            if self._references[slot]:\n",
        "            self._references[slot] -= 1\n            if self._references[slot] > 1:\n",
    ),
    Mutant(
        "kv/pool.py",
        "        self._references[slot] += 1\n",
        "        self._references[slot] = 1\n",
    ),
    Mutant(
        "kv/pool.py",
        "            del self._slot_of[page.key]\n            self.page_of[slot] = None",
        "            self.page_of[slot] = None",
    ),
    Mutant(
        "kv/pool.py",
        "            if page.key in self._slot_of or self.page_of[slot] is not None:\n",
        "            if self.page_of[slot] is not None:\n",
    ),
    Mutant(
        "kv/pool.py",
        "if slot is not None and not self._references[slot]:",
        "if slot is not None:",
    ),
    Mutant(
        "kv/manager.py",
        "first_visible_page(position, self.window, self.page_tokens)",
        "first_visible_page(position + 1, self.window, self.page_tokens)",
    ),
    Mutant(
        "kv/manager.py",
        "(len(tokens) - 1) // self.page_tokens",
        "len(tokens) // self.page_tokens",
    ),
    Mutant(
        "kv/manager.py",
        "for i in range(n - 1, first - 1, -1)",
        "for i in range(n - 1, first, -1)",
    ),
    Mutant(
        "kv/manager.py",
        "            pool.acquire_slots(slots)\n            pages.extend_table(group, [-1]",
        "            pages.extend_table(group, [-1]",
    ),
    Mutant(
        "kv/manager.py",
        "pages.tables, end // self.page_tokens\n",
        "pages.tables, self.count_pages(end)\n",
    ),
    Mutant(
        "kv/manager.py",
        "            self.slide_window(pages, full * size)",
        "            self.slide_window(pages, (full + 1) * size)",
    ),
    Mutant(
        "kv/manager.py",
        "        self.stop_computing(pages, pages.keys[pages.published :])\n",
        "",
    ),
    Mutant(
        "kv/manager.py",
        "        for key in pages.keys[: pages.published]:",
        "        for key in pages.keys[: pages.published - 1]:",
        "tests/kv/test_failed_steps.py",
    ),
    Mutant(
        "kv/manager.py",
        "        if finite and (pages.trusted != pages.published or pages.left):\n",
        "        if pages.trusted != pages.published or pages.left:\n",
        "tests/kv/test_failed_steps.py",
    ),
    # --- loads: what has arrived, where to jump, what is given back
    Mutant(
        "kv/tiers/load.py",
        "max(self.first, self._failed_from,",
        "max(0, self._failed_from,",
    ),
    Mutant(
        "kv/tiers/load.py",
        "max(self._failed_from, item.page.index + 1)",
        "max(self._failed_from, item.page.index)",
    ),
    Mutant(
        "kv/tiers/load.py",
        "return not self.broken and not self.missing[LOCAL]",
        "return not self.broken",
    ),
    Mutant(
        "kv/tiers/load.py",
        "self._passed = max(self._passed, item.page.index + 1)",
        "self._passed = max(self._passed, item.page.index)",
    ),
    Mutant(
        "kv/tiers/load.py",
        "        self.cancelled = True\n",
        "",
    ),
    Mutant(
        "kv/prefix/loader.py",
        "            pool.release_slots(held.values())\n            return None, []",
        "            return None, []",
    ),
    Mutant(
        "kv/prefix/loader.py",
        "((LOCAL, pages.load.window), (GLOBAL, pages.load.found.values()))",
        "((LOCAL, pages.load.window),)",
    ),
    Mutant(
        "kv/prefix/loader.py",
        "            pool.release_slots([table[i] for i in load.found])\n",
        "",
    ),
    Mutant(
        "kv/prefix/parking.py",
        " or not self._tiers.pin_copies(parked.copies):",
        ":",
    ),
    Mutant(
        "kv/prefix/planner.py",
        "    if ready_from <= computed:",
        "    if ready_from <= computed + choice.slice_tokens:",
    ),
    Mutant(
        "kv/prefix/planner.py",
        "        if idle_s < choice.wait_s:",
        "        if idle_s < 20 * choice.wait_s:",
    ),
    # --- tiers: slots, readers, checks, names
    Mutant(
        "kv/tiers/up.py",
        "item.slot >= 0 and load.is_wanted(item):",
        "item.slot >= 0 and not load.broken:",
    ),
    Mutant(
        "kv/tiers/up.py",
        "        host.index.release_copies(copies if all(right) else compress(copies, right))\n",
        "",
    ),
    Mutant(
        "kv/tiers/up.py",
        "        self._tell_verdicts(move, 0, right)\n",
        "        self._tell_verdicts(move, 0, [True, *right[1:]])\n",
    ),
    Mutant(
        "kv/tiers/up.py",
        "digest is None or (digest, copy.page) == copy.checksum",
        "digest is None or not copy.origin or (digest, copy.page) == copy.checksum",
    ),
    Mutant(
        "kv/tiers/up.py",
        "        if load.wrong[place] > MAX_WRONG:",
        "        if load.wrong[place] < 0:",
        "tests/kv/test_places.py",
    ),
    Mutant(
        "kv/tiers/index.py",
        "        self._coming -= stop - first\n",
        "",
        "tests/kv/test_backing.py",
    ),
    Mutant(
        "runtime/page_copier.py",
        "        self._asked |= shared\n",
        "        self._asked.update(keys)\n",
        "tests/runtime/test_stream_page_copier.py",
    ),
    Mutant(
        "runtime/page_copier.py",
        "            lane.copy(batch.pieces)",
        "            (lane if leaving or len(batch.pieces) % 2 else self._compute).copy(batch.pieces)",
        "tests/runtime/test_stream_page_copier.py",
    ),
    Mutant(
        "runtime/page_digest.py",
        "a[t : t + PAIRS], b[t : t + PAIRS], axis=1",
        "a[:PAIRS], b[t : t + PAIRS], axis=1",
        "tests/runtime/test_page_digest.py",
    ),
    # --- memory that both groups share
    Mutant(
        "kv/slabs.py",
        "        if len(free) == self.pages[group]:\n",
        "        if len(free) >= self.pages[group] - 1 and not self._used[slab]:\n",
    ),
    Mutant(
        "runtime/executor.py",
        "range(begin // count, div_ceil(end, count))",
        "range(begin // count, end // count)",
        "tests/runtime/test_stream_page_copier.py",
    ),
    Mutant(
        "kv/tiers/up.py",
        "            self._movers.host.index.acquire_copies([copy])\n            fetch.copy = copy",
        "            fetch.copy = copy",
    ),
    Mutant(
        "kv/tiers/up.py",
        "        index.release_copies(compress(move.sources, right))\n",
        "",
    ),
    Mutant(
        "kv/tiers/down.py",
        'index.abort_copy(target, "timeout", touched=True)',
        'index.abort_copy(target, "timeout")',
    ),
    Mutant(
        "kv/tiers/index.py",
        "            while tenant.slots + need > self._quota_slots:",
        "            while tenant.slots > self._quota_slots:",
    ),
    Mutant(
        "kv/disk/format.py",
        "!= _payload_check(identity, sealed, payload):",
        "!= _payload_check(identity, sealed, payload) and not sealed:",
        "tests/kv/test_disk_format.py",
    ),
    Mutant(
        "kv/pages/hashing.py",
        "            page.update(parent + block + marks",
        "            page.update(block + marks",
    ),
    Mutant(
        "kv/pages/hashing.py",
        ' + marks.get(len(keys), b"")',
        "",
        "tests/kv/test_content.py",
    ),
    # --- scheduler
    Mutant(
        "schedule/scheduler.py",
        "budget.take_tokens(sequence.computed, count, ",
        "budget.take_tokens(sequence.computed, 0, ",
    ),
    Mutant(
        "schedule/scheduler.py",
        "        self.waiting.undo_pops(passed_over)\n",
        "        self.waiting.undo_pops(passed_over[:1])\n",
    ),
    Mutant(
        "schedule/scheduler.py",
        "dict.fromkeys(groups, len(s.tokens) // size + 1)",
        "dict.fromkeys(groups, len(s.tokens) // size)",
    ),
    Mutant(
        "schedule/scheduler.py",
        "        if len(decoding) + stopped < len(live) or not 0 < len(following) <= self.max_batch_tokens:\n",
        "        if not 0 < len(following) <= self.max_batch_tokens:\n",
        "tests/schedule/test_steps_ahead.py",
    ),
    Mutant(
        "kv/copy_down.py",
        "if self._tiers is not None and last_chance and self._pools[group].trusted[slot]:",
        "if self._tiers is not None and last_chance:",
        "tests/kv/test_beside_steps.py",
    ),
    Mutant(
        "kv/prefix/planner.py",
        "        left = min(left, ready_from - computed)",
        "        left = max(left, ready_from - computed)",
        "tests/kv/test_planner.py",
    ),
    Mutant(
        "schedule/step_time.py",
        "if not decoding.rows or not (self.awaited or self.target_s):",
        "if not decoding.rows:",
        "tests/schedule/test_offline_pace.py",
    ),
    Mutant(
        "schedule/scheduler.py",
        "            if victim is sequence and sequence.pages.load is not None:",
        "            if victim is not sequence and sequence.pages.load is not None:",
        "tests/kv/test_written_pages.py",
    ),
    Mutant(
        "schedule/scheduler.py",
        "        return PrefixHit(0, 0, in_flight=False) if sequence.scoring else hit\n",
        "        return hit\n",
        "tests/core/test_prompt_logprobs.py",
    ),
    Mutant(
        "schedule/scheduler.py",
        "if self.loader is not None and not sequence.scoring:\n",
        "if self.loader is not None:\n",
        "tests/core/test_prompt_logprobs.py",
    ),
    Mutant(
        "schedule/scheduler.py",
        "                if self._prompt_order(head) > self._prompt_order(before):\n",
        "                if False:\n",
        "tests/schedule/test_against_reference.py",
    ),
    Mutant(
        "schedule/step_time.py",
        "self._load.with_prompt(start, padded)) <= self._limit_s",
        "self._load.with_prompt(start, padded)) <= 1.1 * self._limit_s",
        "tests/schedule/test_step_time.py",
    ),
    Mutant(
        "schedule/queue.py",
        " + sequence.cost_s, sequence.seq_id)",
        ", sequence.seq_id)",
        "tests/schedule/test_against_reference.py",
    ),
    Mutant(
        "schedule/scheduler.py",
        "self._given.get(sequence.request.tenant, 0) + count\n",
        "self._given.get(sequence.request.tenant, 0) + 1\n",
        "tests/schedule/test_against_reference.py",
    ),
    Mutant(
        "schedule/queue.py",
        "waits is not None and entry.key[0] <= key:",
        "waits is not None and entry.key[0] < key:",
        "tests/schedule/test_overload.py",
    ),
    # --- core
    Mutant(
        "core/limits.py",
        "        found = [name for name, at in self.items() if at <= now]\n",
        "        found = [name for name, at in self.items() if at <= now - 0.05]\n",
        "tests/schedule/test_against_reference.py",
    ),
    Mutant(
        "kv/sequence_pages.py",
        "        self.tables[group].extend(slots)\n        self.stamp = next(STAMPS)\n",
        "        self.tables[group].extend(slots)\n",
    ),
    Mutant(
        "kv/sequence_pages.py",
        "            table[i] = slot\n        self.stamp = next(STAMPS)\n",
        "            table[i] = slot\n",
        "tests/runtime/test_held_tables.py",
    ),
    Mutant(
        "core/engine.py",
        "if raised == number == min(2, len(flight.batch.slices)):",
        "if raised == number:",
        "tests/core/test_step_again.py",
    ),
    Mutant(
        "core/engine.py",
        "result.prompt_logprobs.get(seq_id, [])[max(0, sequence.scored - begin - 1) :]",
        "result.prompt_logprobs.get(seq_id, [])",
        "tests/core/test_prompt_logprobs.py",
    ),
    Mutant(
        "core/engine.py",
        "length - prompt_len + ahead < params.min_tokens",
        "length - prompt_len < params.min_tokens",
    ),
    Mutant(
        "core/engine.py",
        "        for sequence in flight.ended:\n            self._release_sequence(sequence)\n",
        "",
    ),
    # --- images
    Mutant(
        "kv/pages/hashing.py",
        "mark = _SPAN.pack(span.begin, span.end) + span.digest",
        "mark = _SPAN.pack(span.begin, span.end)",
        "tests/kv/test_content.py",
    ),
    Mutant(
        "kv/pages/hashing.py",
        "mark = _SPAN.pack(span.begin, span.end) + span.digest",
        "mark = span.digest",
        "tests/kv/test_content.py",
    ),
    Mutant(
        "kv/sequence_pages.py",
        "        while count in self.barred:\n",
        "        while False:\n",
        "tests/kv/test_images.py",
    ),
    Mutant(
        "kv/sequence_pages.py",
        "(s.end - 1) // page_tokens + 1))",
        "(s.end - 1) // page_tokens))",
        "tests/kv/test_images.py",
    ),
    Mutant(
        "kv/manager.py",
        "        while following in pages.barred:\n",
        "        while False:\n",
        "tests/kv/test_images.py",
    ),
    Mutant(
        "schedule/scheduler.py",
        "            if image.begin < start + count < image.end:\n",
        "            if False:\n",
        "tests/kv/test_images.py",
    ),
    Mutant(
        "schedule/images.py",
        "                if key == self._encoding or key not in self._slots:\n",
        "                if key not in self._slots:\n",
        "tests/schedule/test_image_book.py",
    ),
    Mutant(
        "schedule/images.py",
        "next((key for key in self._slots if key not in self._asked), None)",
        "next(iter(self._slots), None)",
        "tests/schedule/test_image_book.py",
    ),
    Mutant(
        "schedule/images.py",
        "PromptImage(s.begin, s.end, scope + s.digest, s.pixels)",
        "PromptImage(s.begin, s.end, s.digest, s.pixels)",
        "tests/schedule/test_image_book.py",
    ),
    Mutant(
        "schedule/images.py",
        "int(LONGER * decode_s / part_s)",
        "int(decode_s / part_s)",
        "tests/core/test_encodings.py",
    ),
    Mutant(
        "core/encodings.py",
        "        if rests and seconds:\n",
        "        if False:\n",
        "tests/core/test_encodings.py",
    ),
    Mutant(
        "runtime/image_encoder.py",
        "self._graphs[begin : begin + count]:\n",
        "self._graphs[:count]:\n",
        "tests/runtime/test_image_encoder.py",
    ),
    Mutant(
        "core/encodings.py",
        "self._note_end(why)\n",
        "self._note_end(None)\n",
        "tests/kv/test_images.py",
    ),
    Mutant(
        "core/engine.py",
        "reason=FinishReason.ERROR, doubtful=False)",
        "reason=FinishReason.ERROR)",
        "tests/kv/test_images.py",
    ),
    Mutant(
        "backends/torch/ops.py",
        "rows[first : first + count] = self._features[slot, :count]",
        "rows[first : first + count] = 0.0",
        "tests/core/test_images_end_to_end.py",
    ),
    Mutant(
        "runtime/step_inputs.py",
        "key_ends[begin + first : begin + first + count] = s.start + first + count\n",
        "pass\n",
        "tests/core/test_images_end_to_end.py",
    ),
    Mutant(
        "runtime/step_inputs.py",
        "key_ends[begin + first : begin + first + count] = s.start + first + count\n",
        "key_ends[begin + first : begin + first + count] = s.start + first + count - 1\n",
        "tests/core/test_images_end_to_end.py",
    ),
    Mutant(
        "runtime/step_inputs.py",
        "images.append((begin + first, count, slot))",
        "images.append((begin + first, count, own[0][2]))",
        "tests/core/test_images_end_to_end.py",
    ),
)
