// What each KV head gives up of each block, its lowest scores, of equals the earlier ones; which
// slots leave; and what heads move out of them. As `given_up` and `moves_of` in
// arbor/heads/selection.py: whole numbers throughout, so the same on every CPU.
#pragma once

#include <cstring>

#include "native.h"
#include "vector.h"

namespace {

using arbor::HeadSelectJob;
using arbor::Scratch;

// Floats as whole numbers in the same order; both zeros are one number.
inline uint32_t ordered(uint32_t bits) {
    bits = bits == 0x80000000u ? 0 : bits;
    return bits ^ (static_cast<uint32_t>(-static_cast<int32_t>(bits >> 31)) | 0x80000000u);
}

inline int32_t count_up_to(const uint32_t* keys, int64_t count, uint32_t limit) {
    int32_t found = 0;
    for (int64_t i = 0; i < count; i++) found += keys[i] <= limit;
    return found;
}

constexpr int64_t FEW = 256;  // keys: all of them are counted again and again

// The lowest limit up to which at least `wanted` >= 1 keys are; how many are, in `found`.
// No key is below `low`, and `found` are up to `high`.
// `rest` has room for all keys and 16 more.
uint32_t limit_of(const uint32_t* keys, int64_t count, int64_t wanted, uint32_t low, uint32_t high,
                  int64_t* found, uint32_t* rest) {
    // up to `high` are `upper`, at least as many as wanted; below `low` are `below`, fewer
    int64_t below = 0, upper = *found;
    // keys that the limit may be, all or those between `low` and `high`, and how many are below them
    const uint32_t* open = keys;
    int64_t left = count, before = 0;
    for (bool halve = false; low < high && upper != wanted;) {
        // where the limit would be if keys were evenly spread; the middle where that helped little
        uint64_t span = high - low;
        uint64_t part = halve ? span / 2
                              : span * static_cast<uint64_t>(wanted - below) / (upper - below + 1);
        uint32_t middle = low + static_cast<uint32_t>(part < span ? part : span - 1);
        if (left > FEW && upper - below < left / 2) {
            left = store_between(open, left, low, high, rest);
            open = rest;
            before = below;
        }
        int64_t here = before + count_up_to(open, left, middle);
        if (here < wanted) {
            low = middle + 1;
            below = here;
        } else {
            high = middle;
            upper = here;
        }
        halve = high - low > span / 2;
    }
    *found = upper;
    return high;
}

// The keys up to a limit: their bits, after `begin`.
void mark_up_to(const uint32_t* keys, int64_t count, uint32_t limit, int64_t begin,
                uint64_t* bits) {
    for (int64_t i = 0; i < count; i += 16) {
        uint64_t some = up_to(keys + i, limit);
        if (count - i < 16) some &= (1u << (count - i)) - 1;
        int64_t word = (begin + i) / 64, shift = (begin + i) % 64;
        bits[word] |= some << shift;
        if (shift > 48 && some >> (64 - shift)) bits[word + 1] |= some >> (64 - shift);
    }
}

inline void clear(uint64_t* bits, int64_t place) {
    bits[place / 64] &= ~(uint64_t{1} << place % 64);
}

// The lowest keys, `wanted` >= 1 of them, of equals the earlier ones: their bits, after `begin`.
// The others as in `limit_of`.
void mark_lowest(const uint32_t* keys, int64_t count, int64_t wanted, uint32_t low, uint32_t high,
                 int64_t found, int64_t begin, uint64_t* bits, uint32_t* rest) {
    uint32_t limit = limit_of(keys, count, wanted, low, high, &found, rest);
    mark_up_to(keys, count, limit, begin, bits);
    for (int64_t i = count - 1; found > wanted; i--) {
        if (keys[i] != limit) continue;
        clear(bits, begin + i);
        found--;
    }
}

// Bit i of the words is byte i, 0 or 1; the bytes are a multiple of 64.
inline void pack_bits(const uint8_t* bytes, int64_t words, uint64_t* out) {
    for (int64_t word = 0; word < words; word++) {
        uint64_t bits = 0;
        for (int part = 0; part < 8; part++) {
            uint64_t eight;
            std::memcpy(&eight, bytes + word * 64 + part * 8, 8);
            bits |= (eight * 0x0102040810204080u >> 56) << (8 * part);
        }
        out[word] = bits;
    }
}

// The places of the bits of a word, after `base`; how many there are.
inline int64_t store_all(uint64_t bits, int32_t base, int32_t* out) {
    int64_t count = 0;
    for (int part = 0; part < 4; part++) {
        count += store_places(static_cast<uint16_t>(bits >> (16 * part)), base + 16 * part,
                              out + count);
    }
    return count;
}

// What heads give up, and the slots that leave.
void select_heads(const HeadSelectJob& job, Scratch* scratch) {
    int64_t padded = static_cast<int64_t>(job.words) * 64;
    auto* keys = static_cast<uint32_t*>(scratch->take(scratch, padded * 21 + 64));
    auto* first = reinterpret_cast<int32_t*>(keys + padded);
    auto *dropped = first + padded, *guarded = dropped + padded;
    auto* rest = reinterpret_cast<uint32_t*>(guarded + padded);
    auto* gone = reinterpret_cast<uint8_t*>(rest + padded + 16);
    int64_t guards = 0;
    for (int32_t i = 0; i < job.tokens; i++) {
        if (job.guard[i] != HeadSelectJob::NONE) guarded[guards++] = i;
        first[i] = job.tokens;
    }
    for (int32_t head = 0; head < job.heads; head++) {
        const float* scores = job.scores + head * job.row;
        uint64_t* bits = job.gone + static_cast<int64_t>(head) * job.words;
        std::memset(bits, 0, job.words * sizeof(uint64_t));
        int64_t begin = 0, guard = 0;
        for (int32_t block = 0; block < job.blocks; block++) {
            int64_t size = job.sizes[block];
            uint32_t low = ~0u, high = 0;
            int64_t found = size;
            for (int64_t i = begin; i < begin + size; i++) {
                uint32_t key;
                std::memcpy(&key, scores + i, 4);
                key = ordered(key);
                low = key < low ? key : low;
                high = key > high ? key : high;
                keys[i] = key;
            }
            for (; guard < guards && guarded[guard] < begin + size; guard++) {
                bool leaves = job.guard[guarded[guard]] == HeadSelectJob::FIRST;
                keys[guarded[guard]] = leaves ? 0 : ~0u;
                low = leaves ? 0 : low;
                found -= !leaves;
            }
            mark_lowest(keys + begin, size, job.lose[block], low, high, found, begin,
                        bits, rest);
            begin += size;
        }
        int64_t count = 0;
        for (int32_t word = 0; word < job.words; word++) {
            if (bits[word]) count += store_all(bits[word], word * 64, dropped + count);
        }
        for (int64_t k = 0; k < count; k++) first[k] = dropped[k] < first[k] ? dropped[k] : first[k];
    }
    std::memset(gone, 0, padded);
    for (int64_t k = 0; k < job.tokens && first[k] < job.tokens; k++) gone[first[k]] = 1;
    std::memcpy(job.leaving, gone, job.tokens);
    pack_bits(gone, job.words, job.left);
    int64_t moved = 0;
    for (int32_t head = 0; head < job.heads; head++) {
        const uint64_t* bits = job.gone + static_cast<int64_t>(head) * job.words;
        for (int32_t word = 0; word < job.words; word++) {
            moved += __builtin_popcountll(job.left[word] & ~bits[word]);
        }
    }
    *job.moved = moved;
}

// The moves of a selection, head by head.
void list_moves(const HeadSelectJob& job) {
    int64_t sources = 0, targets = 0;
    for (int32_t head = 0; head < job.heads; head++) {
        const uint64_t* bits = job.gone + static_cast<int64_t>(head) * job.words;
        int64_t begin = sources;
        for (int32_t word = 0; word < job.words; word++) {
            uint64_t gone = bits[word], left = job.left[word];
            if (left & ~gone) sources += store_all(left & ~gone, word * 64, job.source + sources);
            if (gone & ~left) targets += store_all(gone & ~left, word * 64, job.target + targets);
        }
        for (int64_t k = begin; k < sources; k++) job.head[k] = head;
    }
}

}  // namespace
