// The next token of a row of logits, and sums from which probabilities follow; see `sample` in
// arbor/engine/sampling.py.
//
// The logits are read twice: for the largest one, and for the sums of e^x, which also sets apart the
// tokens that the cut-offs can keep. Nothing is sorted but the few tokens around a cut. A row's
// sums are those of blocks of tokens, one after the other, so its bits depend on nothing else.
#pragma once

#include "native.h"
#include "wide.h"

namespace {

using arbor::ChoiceJob;
using arbor::LogitSumsJob;
using arbor::Scratch;

constexpr int32_t BLOCK = 256;      // tokens whose largest logit, or whose sum, is remembered
constexpr int64_t FEW_TOKENS = 32;  // are sorted
constexpr double LEAST_WEIGHT = 5e-324;

inline int32_t blocks_of(int32_t vocabulary) { return (vocabulary + BLOCK - 1) / BLOCK; }

// Tokens in the order of their ids, with their weights: probabilities, the largest of them 1.
struct Tokens {
    double* weight;  // room for a vector more
    int32_t* id;     // likewise
    int64_t count;
};

// A token in the order of falling weights, of equals the earlier id first, and what is before it.
struct Ranked {
    double weight;
    int32_t id;
    double mass;    // of those before it
    int64_t rank;   // how many these are
};

// Calls visit(place, numbers) for the vectors of a block; lanes after its end are -inf.
template <class Number, class Visit>
inline void each_of_block(const Number* logits, int32_t begin, int32_t end, Visit visit) {
    int32_t place = begin;
    for (; place + Vec::WIDTH <= end; place += Vec::WIDTH) visit(place, load(logits + place));
    if (place < end) visit(place, load_first(logits + place, end - place, -__builtin_inff()));
}

// The largest logit of each block; returns that of all. NaN is left to the sums.
template <class Number>
float block_tops(const Number* logits, int32_t vocabulary, float* tops) {
    float top = -__builtin_inff();
    for (int32_t block = 0; block < blocks_of(vocabulary); block++) {
        int32_t begin = block * BLOCK, place = begin;
        int32_t end = begin + BLOCK < vocabulary ? begin + BLOCK : vocabulary;
        Vec most[4];
        for (Vec& each : most) each = set1(-__builtin_inff());
        for (; place + 4 * Vec::WIDTH <= end; place += 4 * Vec::WIDTH) {
            WRITTEN_OUT
            for (int i = 0; i < 4; i++) most[i] = max(load(logits + place + i * Vec::WIDTH), most[i]);
        }
        each_of_block(logits, place, end, [&](int32_t, Vec x) { most[0] = max(x, most[0]); });
        tops[block] = largest(max(max(most[0], most[1]), max(most[2], most[3])));
        top = tops[block] > top ? tops[block] : top;
    }
    return top;
}

// The first token whose logit is the largest.
template <class Number>
int32_t first_top(const Number* logits, int32_t vocabulary, const float* tops, float top) {
    int32_t block = 0;
    while (block + 1 < blocks_of(vocabulary) && tops[block] != top) block++;
    int32_t token = block * BLOCK;
    while (token + 1 < vocabulary && to_float(logits[token]) != top) token++;
    return token;
}

// The sum of what weigh(x - top) gives, block by block.
template <class Number, class Weigh>
double sum_of_row(const Number* logits, int32_t vocabulary, float top, Weigh weigh) {
    Wide base = wide(top);
    double total = 0.0;
    for (int32_t begin = 0; begin < vocabulary; begin += BLOCK) {
        int32_t end = begin + BLOCK < vocabulary ? begin + BLOCK : vocabulary;
        Wide first = wide(0.0), second = wide(0.0);
        each_of_block(logits, begin, end, [&](int32_t, Vec x) {
            first = first + weigh(lower(x) - base);
            second = second + weigh(upper(x) - base);
        });
        total += sum(first + second);
    }
    return total;
}

inline double middle_of(double low, double high) {
    int64_t a, b;  // of positive numbers, in the order of the numbers
    std::memcpy(&a, &low, 8);
    std::memcpy(&b, &high, 8);
    a += (b - a) / 2;
    double middle;
    std::memcpy(&middle, &a, 8);
    return middle;
}

// The tokens with weight > pivot, or the others: in place, or elsewhere.
inline Tokens part_of(const Tokens& from, double pivot, bool greater, Tokens out) {
    out.count = 0;
    int64_t i = 0;
    for (; i + Wide::WIDTH <= from.count; i += Wide::WIDTH) {
        Wide weight = load(from.weight + i);
        uint32_t bits = above(weight, wide(pivot));
        if (!greater) bits ^= (1u << Wide::WIDTH) - 1;
        store_where(bits, from.id + i, out.id + out.count);
        store_where(bits, weight, out.weight + out.count);
        out.count += __builtin_popcount(bits);
    }
    for (; i < from.count; i++) {
        if ((from.weight[i] > pivot) != greater) continue;
        out.id[out.count] = from.id[i];
        out.weight[out.count++] = from.weight[i];
    }
    return out;
}

inline double mass_of(const Tokens& tokens) {
    Wide sums[2] = {wide(0.0), wide(0.0)};
    int64_t i = 0;
    for (; i + 2 * Wide::WIDTH <= tokens.count; i += 2 * Wide::WIDTH) {
        sums[0] = sums[0] + load(tokens.weight + i);
        sums[1] = sums[1] + load(tokens.weight + i + Wide::WIDTH);
    }
    double total = sum(sums[0] + sums[1]);
    for (; i < tokens.count; i++) total += tokens.weight[i];
    return total;
}

// The first token for which reached(mass, count), of the tokens up to and with it; the last one if
// there is none. More tokens never undo it.
//
// Tokens are divided at a weight between the least and the largest, and the part without the token is
// left out, until few are left or all are equal.
template <class Reached>
Ranked first_ranked(const Tokens& tokens, double least, Tokens room, Reached reached) {
    Ranked found{0.0, 0, 0.0, 0};
    Tokens open = tokens;
    double low = least, high = 1.0;
    while (open.count > FEW_TOKENS && low < high) {
        double pivot = middle_of(low, high);
        Wide cut = wide(pivot), masses = wide(0.0), lowest = wide(high), highest = wide(low);
        int64_t count = 0, i = 0;
        for (; i + Wide::WIDTH <= open.count; i += Wide::WIDTH) {
            Wide weight = load(open.weight + i);
            uint32_t bits = above(weight, cut);
            masses = masses + where(bits, weight, wide(0.0));
            lowest = min(lowest, where(bits, weight, wide(high)));
            highest = max(highest, where(bits, wide(low), weight));
            count += __builtin_popcount(bits);
        }
        double mass = found.mass, least_above = high, most_below = low;
        for (int lane = 0; lane < Wide::WIDTH; lane++) {
            double lanes[Wide::WIDTH];
            store(lanes, lowest);
            least_above = lanes[lane] < least_above ? lanes[lane] : least_above;
            store(lanes, highest);
            most_below = lanes[lane] > most_below ? lanes[lane] : most_below;
        }
        double part = sum(masses);
        for (; i < open.count; i++) {
            double weight = open.weight[i];
            if (weight > pivot) {
                part += weight;
                count++;
                least_above = weight < least_above ? weight : least_above;
            } else {
                most_below = weight > most_below ? weight : most_below;
            }
        }
        mass += part;
        bool greater = count && (count == open.count || reached(mass, found.rank + count));
        if (greater) {
            low = least_above;
        } else {
            high = most_below;
            found.mass = mass;
            found.rank += count;
        }
        if (count && count < open.count) open = part_of(open, pivot, greater, room);
    }
    if (open.count > FEW_TOKENS) {  // equal ones: the first of them for which it is reached
        int64_t from = 0, to = open.count - 1;
        while (from < to) {
            int64_t middle = (from + to) / 2;
            double mass = found.mass + static_cast<double>(middle + 1) * high;
            if (reached(mass, found.rank + middle + 1)) to = middle;
            else from = middle + 1;
        }
        return {high, open.id[to], found.mass + static_cast<double>(to) * high, found.rank + to};
    }
    double weight[FEW_TOKENS];
    int32_t id[FEW_TOKENS];
    for (int64_t i = 0; i < open.count; i++) {
        int64_t at = i;
        for (; at && weight[at - 1] < open.weight[i]; at--) {
            weight[at] = weight[at - 1];
            id[at] = id[at - 1];
        }
        weight[at] = open.weight[i];
        id[at] = open.id[i];
    }
    for (int64_t i = 0; i < open.count; i++) {
        found.weight = weight[i];
        found.id = id[i];
        if (i + 1 == open.count || reached(found.mass + weight[i], found.rank + 1)) break;
        found.mass += weight[i];
        found.rank++;
    }
    return found;
}

// Leaves the tokens up to and with this one.
inline void keep_up_to(Tokens& tokens, const Ranked& last) {
    int64_t bits;
    std::memcpy(&bits, &last.weight, 8);
    bits--;
    double below;  // the number before the weight
    std::memcpy(&below, &bits, 8);
    tokens = part_of(tokens, below, true, tokens);
    if (tokens.count == last.rank + 1) return;
    int64_t kept = 0;  // equal ones with a later id go
    for (int64_t i = 0; i < tokens.count; i++) {
        if (tokens.weight[i] == last.weight && tokens.id[i] > last.id) continue;
        tokens.id[kept] = tokens.id[i];
        tokens.weight[kept++] = tokens.weight[i];
    }
    tokens.count = kept;
}

// One row of a job.
template <class Number>
struct Chooser {
    const ChoiceJob& job;
    const Number* logits;
    float* tops;        // [blocks, and a vector]
    double* sums;       // likewise, of the tempered weights of a block
    Tokens tokens;      // room for the vocabulary
    Tokens room;        // likewise
    float top = 0.0f;

    // The weight of a token below which no cut-off keeps it.
    double floor_of() {
        int32_t blocks = blocks_of(job.vocabulary);
        Wide scale = wide(1.0 / job.temperature), base = wide(top);
        for (int32_t i = 0; i < blocks; i += Vec::WIDTH) {
            Vec most = load(tops + i);
            store(tokens.weight + i, exp((lower(most) - base) * scale));
            store(tokens.weight + i + Wide::WIDTH, exp((upper(most) - base) * scale));
        }
        for (int32_t i = 0; i < blocks; i++) tokens.id[i] = i;
        tokens.count = blocks;
        double floor = job.min_p;
        if (job.top_k) {
            // so many blocks have a token of at least this weight
            auto reached = [&](double, int64_t count) { return count >= job.top_k; };
            bool enough = job.top_k <= blocks;
            floor = enough ? first_ranked(tokens, 0.0, room, reached).weight : 0.0;
        } else {
            double nucleus = left_out(mass_of(tokens));
            floor = nucleus > floor ? nucleus : floor;
        }
        return floor > LEAST_WEIGHT ? floor : LEAST_WEIGHT;
    }

    // The weight below which all tokens together weigh less than a nucleus of at least `total` leaves
    // out.
    double left_out(double total) { return (1.0 - job.top_p) * total / (2.0 * job.vocabulary); }

    void run(int32_t row) {
        double* out = job.out + row;
        auto put = [&](int32_t token, double logprob, double top1, double left, double share) {
            double all[] = {static_cast<double>(token), logprob, top1, left, share};
            for (int i = 0; i < 5; i++) out[static_cast<int64_t>(i) * job.rows] = all[i];
        };
        int32_t blocks = blocks_of(job.vocabulary);
        top = block_tops(logits, job.vocabulary, tops);
        for (int32_t i = 0; i < Vec::WIDTH; i++) tops[blocks + i] = -__builtin_inff();
        bool cuts = job.top_k || job.top_p < 1.0 || job.min_p > 0.0;
        double floor = job.temperature > 0.0 && cuts ? floor_of() : 0.0;
        double plain = 0.0, tempered = 0.0;
        tokens.count = 0;
        if (job.temperature > 0.0) {
            sum_both(floor, cuts, &plain, &tempered);
        } else {
            plain = sum_of_row(logits, job.vocabulary, top,
                               [](Wide below) { return exp(below); });
        }
        double highest = 1.0 / plain;
        if (!(highest > 0.0)) return put(0, __builtin_nan(""), __builtin_nan(""), 0.0, 0.0);
        auto logprob = [&](int32_t token) {
            return static_cast<double>(to_float(logits[token])) - top - std::log(plain);
        };
        if (job.temperature == 0.0) {
            int32_t token = first_top(logits, job.vocabulary, tops, top);
            return put(token, logprob(token), highest, 0.0, 1.0);
        }
        double mass = cuts ? cut(floor, tempered) : tempered;
        double target = job.numbers[row] * mass;
        Ranked drawn = cuts ? first_ranked(tokens, floor, room,
                                           [&](double before, int64_t) { return before > target; })
                            : first_by_id(target);
        double left = (target - drawn.mass) / drawn.weight;
        constexpr double MOST = 1.0 - 0x1p-53;
        left = left < 0.0 ? 0.0 : left > MOST ? MOST : left;
        put(drawn.id, logprob(drawn.id), highest, left, drawn.weight / mass);
    }

    // Both sums, those of blocks, and the tokens that weigh at least `floor`, or more where what has
    // been seen allows it. The plain sum is of float32, within 1e-6, where the other one differs.
    void sum_both(double floor, bool cuts, double* plain, double* tempered) {
        bool warm = job.temperature != 1.0, rises = job.top_p < 1.0 && !job.top_k;
        Wide base = wide(top), scale = wide(1.0 / job.temperature);
        int64_t count = 0;
        int32_t ids[Wide::WIDTH];
        for (int32_t begin = 0; begin < job.vocabulary; begin += BLOCK) {
            int32_t end = begin + BLOCK < job.vocabulary ? begin + BLOCK : job.vocabulary;
            Wide sampled[2] = {wide(0.0), wide(0.0)}, least = wide(floor);
            Vec raw = set1(0.0f);
            auto see = [&](int half, int32_t place, Wide below) {
                Wide weight = exp(below * scale);
                sampled[half] = sampled[half] + weight;
                uint32_t bits = cuts ? at_least(weight, least) : 0;
                if (bits == 0) return;
                for (int i = 0; i < Wide::WIDTH; i++) ids[i] = place + i;
                store_where(bits, weight, tokens.weight + count);
                store_where(bits, ids, tokens.id + count);
                count += __builtin_popcount(bits);
            };
            each_of_block(logits, begin, end, [&](int32_t place, Vec x) {
                see(0, place, lower(x) - base);
                see(1, place + Wide::WIDTH, upper(x) - base);
                if (warm) raw = raw + exp(x - set1(top));
            });
            double own = sum(sampled[0] + sampled[1]);
            sums[begin / BLOCK] = own;
            *tempered += own;
            *plain += warm ? sum(lower(raw) + upper(raw)) : own;
            if (rises && left_out(*tempered) > floor) floor = left_out(*tempered);
        }
        tokens.count = count;
    }

    // Leaves the tokens that the cut-offs keep; returns what they weigh together.
    double cut(double floor, double total) {
        if (job.top_k) {
            auto reached = [&](double, int64_t count) { return count >= job.top_k; };
            keep_up_to(tokens, first_ranked(tokens, floor, room, reached));
            total = mass_of(tokens);
        }
        if (job.top_p < 1.0) {
            double most = job.top_p * total;
            auto reached = [&](double mass, int64_t) { return mass >= most; };
            keep_up_to(tokens, first_ranked(tokens, floor, room, reached));
        }
        if (job.top_k && job.min_p > 0.0) {
            int64_t kept = 0;
            for (int64_t i = 0; i < tokens.count; i++) {
                if (tokens.weight[i] < job.min_p) continue;
                tokens.id[kept] = tokens.id[i];
                tokens.weight[kept++] = tokens.weight[i];
            }
            tokens.count = kept;
        }
        return mass_of(tokens);
    }

    // The first token, in the order of ids, up to and with which the tokens weigh more than `target`;
    // the last one that weighs anything if there is none.
    Ranked first_by_id(double target) {
        double before = 0.0;
        Ranked found{0.0, 0, 0.0, 0};
        for (int32_t block = 0; block < blocks_of(job.vocabulary); block++) {
            if (sums[block] == 0.0) continue;
            double after = before + sums[block];
            bool last = true;
            for (int32_t i = block + 1; last && i < blocks_of(job.vocabulary); i++) {
                last = sums[i] == 0.0;
            }
            if (after > target || last) return first_in_block(block, before, target);
            before = after;
        }
        return found;
    }

    Ranked first_in_block(int32_t block, double before, double target) {
        Wide base = wide(top), scale = wide(1.0 / job.temperature);
        double weights[BLOCK + Vec::WIDTH];
        int32_t begin = block * BLOCK;
        int32_t end = begin + BLOCK < job.vocabulary ? begin + BLOCK : job.vocabulary;
        each_of_block(logits, begin, end, [&](int32_t place, Vec x) {
            store(weights + place - begin, exp((lower(x) - base) * scale));
            store(weights + place - begin + Wide::WIDTH, exp((upper(x) - base) * scale));
        });
        Ranked found{0.0, 0, 0.0, 0};
        for (int32_t i = 0; i < end - begin; i++) {
            if (weights[i] == 0.0) continue;
            found = {weights[i], begin + i, before, 0};
            before += weights[i];
            if (before > target) break;
        }
        return found;
    }
};

template <class Number>
void choose_row(const ChoiceJob& job, int32_t row, Scratch* scratch) {
    int64_t blocks = blocks_of(job.vocabulary) + Vec::WIDTH;
    int64_t tokens = static_cast<int64_t>(job.vocabulary) + 4 * Vec::WIDTH;
    auto* memory = static_cast<double*>(scratch->take(scratch, (2 * blocks + 3 * tokens) * 8));
    double *sums = memory, *first = sums + blocks, *second = first + tokens;
    auto* ids = reinterpret_cast<int32_t*>(second + tokens);
    auto* tops = reinterpret_cast<float*>(ids + 2 * tokens);
    const Number* logits = static_cast<const Number*>(job.logits) + row * job.row;
    Chooser<Number>{job, logits, tops, sums, {first, ids, 0}, {second, ids + tokens, 0}}.run(row);
}

void choose(const ChoiceJob& job, int32_t row, Scratch* scratch) {
    if (job.number == arbor::BFLOAT16) return choose_row<bf16>(job, row, scratch);
    choose_row<float>(job, row, scratch);
}

template <class Number>
void sum_logits_of_row(const LogitSumsJob& job, int32_t row, Scratch* scratch) {
    auto* tops = static_cast<float*>(scratch->take(scratch, blocks_of(job.vocabulary) * 4));
    const Number* logits = static_cast<const Number*>(job.logits) + row * job.row;
    float top = block_tops(logits, job.vocabulary, tops);
    Wide terms = wide(0.0);
    double total = sum_of_row(logits, job.vocabulary, top, [&](Wide below) {
        Wide weight = exp(below);
        // 0 * -inf of impossible tokens is left out
        terms = terms + where(above(weight, wide(0.0)), weight * below, wide(0.0));
        return weight;
    });
    double* out = job.out + row;
    out[0] = top;
    out[job.rows] = total;
    out[2 * job.rows] = std::log(total) - sum(terms) / total;
    out[3 * job.rows] = first_top(logits, job.vocabulary, tops, top);
}

void sum_logits(const LogitSumsJob& job, int32_t row, Scratch* scratch) {
    if (job.number == arbor::BFLOAT16) return sum_logits_of_row<bf16>(job, row, scratch);
    sum_logits_of_row<float>(job, row, scratch);
}

}  // namespace
