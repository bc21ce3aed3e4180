// What stays in the cells of KV heads that keep different numbers of tokens of a block; which slots
// leave; and what moves out of their cells. As `Cells.stays` and `vacated` in
// arbor/retention/head_budgets.py: whole numbers throughout, so the same on every CPU.
#pragma once

#include <cstring>

#include "head_select.h"
#include "native.h"
#include "vector.h"

namespace {

using arbor::HeadShareJob;

constexpr uint32_t BEST_KEY = 0xff7fffffu;  // the key of the largest finite score

// Where heads lie in `keys`.
inline int64_t stride(const HeadShareJob& job) {
    return static_cast<int64_t>(job.words) * 64 + 16;
}

template <typename Holder>
void count_holders(const HeadShareJob& job) {
    auto* holders = static_cast<const Holder*>(job.holders);
    for (int32_t cell = 0; cell < job.heads; cell++) {
        const Holder* of = holders + static_cast<int64_t>(cell) * job.tokens;
        int64_t begin = 0;
        for (int32_t block = 0; block < job.blocks; block++) {
            int64_t end = begin + job.sizes[block];
            for (int64_t i = begin; i < end; i++) {
                job.held[static_cast<int64_t>(of[i]) * job.blocks + block]++;
            }
            begin = end;
        }
    }
}

// How many tokens each head holds of each block; there are holders.
void count_held(const HeadShareJob& job) {
    std::memset(job.held, 0, sizeof(int64_t) * job.heads * job.blocks);
    job.wide ? count_holders<int32_t>(job) : count_holders<int16_t>(job);
}

// Scores as keys; protected tokens last, or first where only they are left.
void make_keys(const HeadShareJob& job, const int32_t* guarded, int64_t guards) {
    for (int32_t head = 0; head < job.heads; head++) {
        const float* scores = job.scores + head * job.row;
        uint32_t* keys = job.keys + head * stride(job);
        for (int32_t i = 0; i < job.tokens; i++) {
            uint32_t key;
            std::memcpy(&key, scores + i, 4);
            keys[i] = ordered(key);
        }
        for (int64_t k = 0; k < guards; k++) {
            keys[guarded[k]] = job.guard[guarded[k]] == HeadSelectJob::FIRST ? 0 : ~0u;
        }
    }
}

inline void bounds(const uint32_t* keys, int64_t count, uint32_t* low, uint32_t* high) {
    uint32_t least = ~0u, most = 0;
    for (int64_t i = 0; i < count; i++) {
        least = keys[i] < least ? keys[i] : least;
        most = keys[i] > most ? keys[i] : most;
    }
    *low = least;
    *high = most;
}

// The lowest tokens of each head, all but `counts`, where every cell is its head's own.
void drop_of_heads(const HeadShareJob& job, uint32_t* rest) {
    for (int32_t head = 0; head < job.heads; head++) {
        const uint32_t* keys = job.keys + head * stride(job);
        int64_t begin = 0;
        for (int32_t block = 0; block < job.blocks; block++) {
            int64_t size = job.sizes[block];
            int64_t wanted = size - job.counts[static_cast<int64_t>(head) * job.blocks + block];
            if (wanted > 0) {
                uint32_t low, high;
                bounds(keys + begin, size, &low, &high);
                mark_lowest(keys + begin, size, wanted, low, high, size, begin,
                            job.gone + static_cast<int64_t>(head) * job.words, rest);
            }
            begin += size;
        }
    }
}

// The same where heads hold tokens in each other's cells; of equals the later slot's stay, of one
// slot those in later cells.
template <typename Holder>
void drop_of_holders(const HeadShareJob& job, Scratch* scratch) {
    auto* holders = static_cast<const Holder*>(job.holders);
    int64_t heads = job.heads, across = stride(job);
    auto* ends = static_cast<int64_t*>(scratch->take(scratch, heads * 24));
    auto *over = ends + heads, *limits = over + heads;
    uint32_t *listed = job.listed, *rest = job.rest;
    int64_t begin = 0;
    for (int32_t block = 0; block < job.blocks; block++) {
        int64_t size = job.sizes[block], end = begin + size, before = 0;
        for (int64_t head = 0; head < heads; head++) {
            ends[head] = before;
            before += job.held[head * job.blocks + block];
        }
        for (int64_t cell = 0; cell < heads; cell++) {
            const uint32_t* keys = job.keys + cell * across;
            const Holder* of = holders + cell * job.tokens;
            for (int64_t i = begin; i < end; i++) listed[ends[of[i]]++] = keys[i];
        }
        int64_t left = 0;
        for (int64_t head = 0; head < heads; head++) {
            int64_t count = job.held[head * job.blocks + block];
            int64_t wanted = count - job.counts[head * job.blocks + block], found = count;
            limits[head] = -1;
            over[head] = 0;
            if (wanted <= 0) continue;
            uint32_t low, high;
            const uint32_t* mine = listed + ends[head] - count;
            bounds(mine, count, &low, &high);
            limits[head] = limit_of(mine, count, wanted, low, high, &found, rest);
            over[head] = found - wanted;
            left += over[head];
        }
        for (int64_t cell = 0; cell < heads; cell++) {
            const uint32_t* keys = job.keys + cell * across;
            const Holder* of = holders + cell * job.tokens;
            uint64_t* bits = job.gone + cell * job.words;
            for (int64_t i = begin; i < end; i++) {
                uint64_t leaves = static_cast<int64_t>(keys[i]) <= limits[of[i]];
                bits[i / 64] |= leaves << i % 64;
            }
        }
        for (int64_t i = end - 1; left > 0; i--) {
            for (int64_t cell = heads - 1; cell >= 0; cell--) {
                int64_t head = holders[cell * job.tokens + i];
                if (!over[head] || job.keys[cell * across + i] != limits[head]) continue;
                clear(job.gone + cell * job.words, i);
                over[head]--;
                left--;
            }
        }
        begin = end;
    }
}

// Of each layer the lowest cells, as many as slots leave; those that `gone` lacks come last but for
// protected ones.
void drop_of_layers(const HeadShareJob& job) {
    int64_t across = stride(job), each = job.heads / job.layers;
    for (int32_t head = 0; head < job.heads; head++) {
        uint32_t* keys = job.keys + head * across;
        uint64_t* bits = job.gone + static_cast<int64_t>(head) * job.words;
        for (int32_t word = 0; word < job.words; word++) {
            int64_t most = job.tokens - static_cast<int64_t>(word) * 64;
            uint64_t best = ~bits[word] & (most < 64 ? (uint64_t{1} << most) - 1 : ~uint64_t{0});
            for (; best; best &= best - 1) {
                int64_t i = static_cast<int64_t>(word) * 64 + __builtin_ctzll(best);
                if (job.guard[i] == HeadSelectJob::NONE) keys[i] = BEST_KEY;
            }
        }
        std::memset(bits, 0, job.words * sizeof(uint64_t));
    }
    uint32_t *listed = job.listed, *rest = job.rest;
    for (int64_t layer = 0; layer < job.layers; layer++) {
        int64_t begin = 0;
        for (int32_t block = 0; block < job.blocks; block++) {
            int64_t size = job.sizes[block], count = size * each;
            int64_t wanted = job.lose[block] * each, found = count;
            if (wanted > 0) {
                for (int64_t k = 0; k < each; k++) {
                    std::memcpy(listed + k * size, job.keys + (layer * each + k) * across + begin,
                                size * sizeof(uint32_t));
                }
                uint32_t low, high;
                bounds(listed, count, &low, &high);
                uint32_t limit = limit_of(listed, count, wanted, low, high, &found, rest);
                for (int64_t k = 0; k < each; k++) {
                    mark_up_to(listed + k * size, size, limit, begin,
                               job.gone + (layer * each + k) * job.words);
                }
                for (int64_t i = size - 1; found > wanted; i--) {
                    for (int64_t k = each - 1; k >= 0 && found > wanted; k--) {
                        if (listed[k * size + i] != limit) continue;
                        clear(job.gone + (layer * each + k) * job.words, begin + i);
                        found--;
                    }
                }
            }
            begin += size;
        }
    }
}

// Bits 8 j + k and 8 k + j change places.
inline uint64_t transposed(uint64_t bits) {
    uint64_t some = (bits ^ bits >> 7) & 0x00aa00aa00aa00aau;
    bits ^= some ^ some << 7;
    some = (bits ^ bits >> 14) & 0x0000cccc0000ccccu;
    bits ^= some ^ some << 14;
    some = (bits ^ bits >> 28) & 0x00000000f0f0f0f0u;
    return bits ^ some ^ some << 28;
}

// The bits of a pool's cells in one word of `gone`, slot by slot: `eights` times 8 cells each.
void by_slot(const HeadShareJob& job, int64_t from, int64_t each, int64_t word, int64_t eights,
             uint8_t* out) {
    for (int64_t eight = 0; eight < eights; eight++) {
        uint64_t rows[8];
        for (int64_t k = 0; k < 8; k++) {
            int64_t cell = eight * 8 + k;
            rows[k] = cell < each ? job.gone[(from + cell) * job.words + word] : 0;
        }
        for (int part = 0; part < 8; part++) {
            uint64_t bits = 0;
            for (int k = 0; k < 8; k++) bits |= (rows[k] >> 8 * part & 0xff) << 8 * k;
            bits = transposed(bits);
            for (int j = 0; j < 8; j++) {
                out[(8 * part + j) * eights + eight] = static_cast<uint8_t>(bits >> 8 * j);
            }
        }
    }
}

// The places of the bits of each byte, and how many there are.
struct BitPlaces {
    uint8_t place[256][8] = {}, count[256] = {};
    constexpr BitPlaces() {
        for (int byte = 0; byte < 256; byte++) {
            for (int bit = 0; bit < 8; bit++) {
                if (byte >> bit & 1) place[byte][count[byte]++] = static_cast<uint8_t>(bit);
            }
        }
    }
};
constexpr BitPlaces BIT_PLACES;

// The k-th slot that leaves is the first in which any pool's token number k * each + 1 leaves.
void leave_slots(const HeadShareJob& job, Scratch* scratch) {
    int64_t padded = static_cast<int64_t>(job.words) * 64, each = job.heads / job.pools;
    int64_t eights = (each + 7) / 8;
    auto* first = static_cast<int32_t*>(scratch->take(scratch, padded * 5 + eights * 64));
    auto* slots = reinterpret_cast<uint8_t*>(first + padded);
    uint8_t* gone = slots + eights * 64;
    for (int32_t i = 0; i < job.tokens; i++) first[i] = job.tokens;
    for (int64_t pool = 0; pool < job.pools; pool++) {
        int64_t lost = 0, k = 0;
        for (int32_t word = 0; word < job.words; word++) {
            by_slot(job, pool * each, each, word, eights, slots);
            for (int32_t i = 0; i < 64; i++) {
                for (int64_t eight = 0; eight < eights; eight++) {
                    lost += BIT_PLACES.count[slots[i * eights + eight]];
                }
                if (k * each >= lost) continue;
                int32_t slot = word * 64 + i;
                first[k] = slot < first[k] ? slot : first[k];
                k++;
            }
        }
    }
    std::memset(gone, 0, padded);
    for (int64_t k = 0; k < job.tokens && first[k] < job.tokens; k++) gone[first[k]] = 1;
    std::memcpy(job.leaving, gone, job.tokens);
    pack_bits(gone, job.words, job.left);
}

// What stays, which slots leave, and how many tokens move.
void share_cells(const HeadShareJob& job, Scratch* scratch) {
    auto* guarded = static_cast<int32_t*>(scratch->take(scratch, job.tokens * 4 + 64));
    int64_t guards = 0;
    for (int32_t i = 0; i < job.tokens; i++) {
        if (job.guard[i] != HeadSelectJob::NONE) guarded[guards++] = i;
    }
    make_keys(job, guarded, guards);
    std::memset(job.gone, 0, sizeof(uint64_t) * job.words * job.heads);
    if (!job.holders) {
        drop_of_heads(job, job.rest);
    } else {
        job.wide ? drop_of_holders<int32_t>(job, scratch) : drop_of_holders<int16_t>(job, scratch);
    }
    if (job.competes) drop_of_layers(job);
    leave_slots(job, scratch);
    int64_t moved = 0;
    for (int32_t head = 0; head < job.heads; head++) {
        const uint64_t* bits = job.gone + static_cast<int64_t>(head) * job.words;
        for (int32_t word = 0; word < job.words; word++) {
            moved += __builtin_popcountll(job.left[word] & ~bits[word]);
        }
    }
    *job.moved = moved;
}

// The moves, pool by pool in the order of the slots: what stays in slots that leave, to the cells of
// slots that stay whose tokens leave. 8 numbers after each list may be written too.
void list_shared(const HeadShareJob& job, Scratch* scratch) {
    int64_t each = job.heads / job.pools, eights = (each + 7) / 8;
    auto* slots = static_cast<uint8_t*>(scratch->take(scratch, eights * 64));
    int64_t counts[2] = {0, 0};  // of sources and targets
    for (int64_t pool = 0; pool < job.pools; pool++) {
        for (int32_t word = 0; word < job.words; word++) {
            by_slot(job, pool * each, each, word, eights, slots);
            int64_t most = job.tokens - static_cast<int64_t>(word) * 64;
            uint64_t here = most < 64 ? (uint64_t{1} << most) - 1 : ~uint64_t{0};
            for (int stay = 0; stay < 2; stay++) {
                int32_t *cells = stay ? job.into : job.cell, *at = stay ? job.target : job.source;
                int64_t count = counts[stay];
                uint64_t those = (stay ? ~job.left[word] : job.left[word]) & here;
                for (; those; those &= those - 1) {
                    int slot = __builtin_ctzll(those);
                    for (int64_t eight = 0; eight < eights; eight++) {
                        int64_t cell = eight * 8;
                        unsigned mask = each - cell < 8 ? (1u << (each - cell)) - 1 : 0xff;
                        unsigned byte = (stay ? slots[slot * eights + eight]
                                              : ~slots[slot * eights + eight]) & mask;
                        int32_t base = static_cast<int32_t>(pool * each + cell);
                        for (int k = 0; k < 8; k++) {
                            cells[count + k] = base + BIT_PLACES.place[byte][k];
                            at[count + k] = word * 64 + slot;
                        }
                        count += BIT_PLACES.count[byte];
                    }
                }
                counts[stay] = count;
            }
        }
    }
}

}  // namespace
