// What each KV head gives up of each block, its lowest scores, of equals the earlier ones; which
// slots leave; and what heads move out of them. As `given_up` and `moves_of` in
// arbor/retention/head_selection.py: whole numbers throughout, so the same on every CPU.
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

// The lowest keys, `wanted` >= 1 of them, of equals the earlier ones, as bytes of 1.
void mark_lowest(const uint32_t* keys, int64_t count, int64_t wanted, uint8_t* gone) {
    uint32_t low = ~0u, high = 0;
    for (int64_t i = 0; i < count; i++) {
        low = keys[i] < low ? keys[i] : low;
        high = keys[i] > high ? keys[i] : high;
    }
    // at least `wanted` are up to `high`, fewer are below `low`
    int32_t found = static_cast<int32_t>(count);
    if (wanted == 1 && low < high) {
        high = low;
        found = count_up_to(keys, count, low);
    }
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        int32_t here = count_up_to(keys, count, middle);
        if (here < wanted) {
            low = middle + 1;
        } else {
            high = middle;
            found = here;
            if (here == wanted) break;
        }
    }
    for (int64_t i = 0; i < count; i++) gone[i] = keys[i] <= high;
    for (int64_t i = count - 1; found > wanted; i--) {
        if (keys[i] != high) continue;
        gone[i] = 0;
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
    auto* keys = static_cast<uint32_t*>(scratch->take(scratch, padded * 21));
    auto *keep = keys + padded, *lift = keep + padded;
    auto* first = reinterpret_cast<int32_t*>(lift + padded);
    auto* dropped = first + padded;
    auto* gone = reinterpret_cast<uint8_t*>(dropped + padded);
    for (int64_t i = 0; i < job.tokens; i++) {
        keep[i] = job.guard[i] == HeadSelectJob::FIRST ? 0 : ~0u;
        lift[i] = job.guard[i] == HeadSelectJob::LAST ? ~0u : 0;
        first[i] = job.tokens;
    }
    std::memset(gone, 0, padded);
    for (int32_t head = 0; head < job.heads; head++) {
        const float* scores = job.scores + head * job.row;
        for (int64_t i = 0; i < job.tokens; i++) {
            uint32_t bits;
            std::memcpy(&bits, scores + i, 4);
            keys[i] = (ordered(bits) & keep[i]) | lift[i];
        }
        int64_t begin = 0;
        for (int32_t block = 0; block < job.blocks; block++) {
            mark_lowest(keys + begin, job.sizes[block], job.lose[block], gone + begin);
            begin += job.sizes[block];
        }
        uint64_t* bits = job.gone + static_cast<int64_t>(head) * job.words;
        pack_bits(gone, job.words, bits);
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
