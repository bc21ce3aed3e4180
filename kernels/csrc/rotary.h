// Rotary position embedding of queries and keys, and the write of K and V to their slots.
// A number depends on its own pair alone and is rounded where torch rounds it, so the bits are those
// of the modelling code of transformers, and a row's do not depend on the other rows.
#pragma once

#include "fused.h"
#include "native.h"
#include "vector.h"

namespace {

using arbor::RotaryJob;

constexpr int MOST_PAIRS = 128;  // of a head of 256 numbers

// The cosines and sines of one row: of the first and of the second numbers of its pairs.
struct alignas(64) Angles {
    float cos_first[MOST_PAIRS], cos_second[MOST_PAIRS];
    float sin_first[MOST_PAIRS], sin_second[MOST_PAIRS];
};

template <class Number>
void read_numbers(const Number* x, int count, float* out) {
    int place = 0;
    for (; place + Vec::WIDTH <= count; place += Vec::WIDTH) store(out + place, load(x + place));
    for (; place < count; place++) out[place] = to_float(x[place]);
}

template <class Number>
void write_numbers(const float* x, int count, Number* out) {
    int place = 0;
    for (; place + Vec::WIDTH <= count; place += Vec::WIDTH) store(out + place, load(x + place));
    if (place < count) store_first(out + place, count - place, load(x + place));
}

// The first and the second numbers of the pairs of a head. Whole vectors are computed; what lies
// behind the last pair is not used.
struct alignas(64) Pairs {
    float first[MOST_PAIRS], second[MOST_PAIRS];
};

// Reads pairs: neighbours, or number i of either half.
template <class Number>
void split_pairs(const Number* x, int pairs, bool interleaved, float* first, float* second) {
    if (!interleaved) {
        read_numbers(x, pairs, first);
        read_numbers(x + pairs, pairs, second);
        return;
    }
    for (int i = 0; i < pairs; i++) {
        first[i] = to_float(x[2 * i]);
        second[i] = to_float(x[2 * i + 1]);
    }
}

template <class Number>
void join_pairs(const float* first, const float* second, int pairs, bool interleaved, Number* out) {
    if (!interleaved) {
        write_numbers(first, pairs, out);
        write_numbers(second, pairs, out + pairs);
        return;
    }
    float both[2 * MOST_PAIRS];
    for (int i = 0; i < pairs; i++) {
        both[2 * i] = first[i];
        both[2 * i + 1] = second[i];
    }
    write_numbers(both, 2 * pairs, out);
}

template <class Table>
void read_angles(const RotaryJob& job, int row, Angles* angles) {
    const Table* cos = static_cast<const Table*>(job.cos) + row * job.cos_row;
    const Table* sin = static_cast<const Table*>(job.sin) + row * job.sin_row;
    int pairs = job.rotated / 2;
    if (job.one_angle) {
        read_numbers(cos, pairs, angles->cos_first);
        read_numbers(cos, pairs, angles->cos_second);
        read_numbers(sin, pairs, angles->sin_first);
        read_numbers(sin, pairs, angles->sin_second);
        return;
    }
    split_pairs(cos, pairs, job.interleaved, angles->cos_first, angles->cos_second);
    split_pairs(sin, pairs, job.interleaved, angles->sin_first, angles->sin_second);
}

template <class Number>
void rotate_head(const RotaryJob& job, const Angles& angles, const Number* x, Number* out,
                 Pairs* room) {
    float *first = room->first, *second = room->second;
    int pairs = job.rotated / 2;
    split_pairs(x, pairs, job.interleaved, first, second);
    auto product = [&job](Vec a, Vec b) {
        return job.rounds_products ? rounded(a * b, static_cast<const Number*>(nullptr)) : a * b;
    };
    for (int i = 0; i < pairs; i += Vec::WIDTH) {
        Vec a = load(first + i), b = load(second + i);
        store(first + i, product(a, load(angles.cos_first + i)) -
                             product(b, load(angles.sin_first + i)));
        store(second + i, product(b, load(angles.cos_second + i)) +
                              product(a, load(angles.sin_second + i)));
    }
    join_pairs(first, second, pairs, job.interleaved, out);
    std::memcpy(out + job.rotated, x + job.rotated, sizeof(Number) * (job.dim_qk - job.rotated));
}

template <class Number>
void rotary_rows(const RotaryJob& job) {
    Angles angles = {};
    Pairs room = {};
    for (int row = 0; row < job.rows; row++) {
        if (job.rotated) {
            if (job.table_number == arbor::BFLOAT16) read_angles<bf16>(job, row, &angles);
            else read_angles<float>(job, row, &angles);
        }
        const Number* q = static_cast<const Number*>(job.q) + row * job.q_row;
        Number* q_out = static_cast<Number*>(job.q_out) +
                        static_cast<int64_t>(row) * job.q_heads * job.dim_qk;
        for (int head = 0; head < job.q_heads; head++) {
            rotate_head(job, angles, q + head * job.q_head, q_out + head * job.dim_qk,
                        &room);
        }
        int64_t slot = job.slots ? job.slots[row] : row;
        const Number* k = static_cast<const Number*>(job.k) + row * job.k_row;
        Number* k_out = static_cast<Number*>(job.k_out) + slot * job.k_out_slot;
        for (int head = 0; head < job.kv_heads; head++) {
            rotate_head(job, angles, k + head * job.k_head, k_out + head * job.k_out_head,
                        &room);
        }
        if (!job.v) continue;
        const Number* v = static_cast<const Number*>(job.v) + row * job.v_row;
        Number* v_out = static_cast<Number*>(job.v_out) + slot * job.v_out_slot;
        for (int head = 0; head < job.kv_heads; head++) {
            std::memcpy(v_out + head * job.v_out_head, v + head * job.v_head,
                        sizeof(Number) * job.dim_vo);
        }
    }
}

void rotary(const RotaryJob& job) {
    if (job.number == arbor::BFLOAT16) return rotary_rows<bf16>(job);
    rotary_rows<float>(job);
}

}  // namespace
