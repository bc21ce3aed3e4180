// The library's functions: the instruction set in use, and jobs divided among threads.

#include <cstdlib>
#include <cstring>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include <pthread.h>

#include "cpu.h"
#include "native.h"

namespace {

using namespace arbor;

#define EXPORT extern "C" __attribute__((visibility("default")))

// Memory of one thread.
struct OwnScratch : Scratch {
    char* memory = nullptr;
    int64_t size = 0;

    OwnScratch() { take = &grow; }
    ~OwnScratch() { std::free(memory); }

    static void* grow(Scratch* self, int64_t bytes) {
        auto* own = static_cast<OwnScratch*>(self);
        if (bytes > own->size) {
            std::free(own->memory);
            own->size = (bytes + 4095) / 4096 * 4096;
            own->memory = static_cast<char*>(std::aligned_alloc(64, own->size));
            if (own->memory == nullptr) std::abort();  // a few MiB: nothing else would run either
        }
        return own->memory;
    }
};

thread_local OwnScratch own_scratch;

// Threads that wait for work; the caller does part 0 itself.
class Pool {
  public:
    // Calls work(part) for every part below `parts`, on as many threads.
    template <class Work>
    void run(int parts, Work work) {
        if (parts < 1) return;
        if (parts == 1) return work(0);
        std::lock_guard<std::mutex> one_at_a_time(callers_);
        if (!hire(parts - 1)) {
            for (int part = 0; part < parts; part++) work(part);
            return;
        }
        {
            std::lock_guard<std::mutex> lock(state_);
            call_ = [](void* given, int part) { (*static_cast<Work*>(given))(part); };
            work_ = &work;
            parts_ = parts;
            left_.store(parts - 1, std::memory_order_relaxed);
            round_++;
        }
        begin_.notify_all();
        work(0);
        for (int spin = 0; left_.load(std::memory_order_acquire) && spin < SPINS; spin++) {
            pause_briefly();
        }
        std::unique_lock<std::mutex> lock(state_);
        end_.wait(lock, [this] { return left_.load(std::memory_order_acquire) == 0; });
    }

  private:
    static constexpr int SPINS = 2000;

    // Whether there are so many threads now; the system may refuse more.
    bool hire(int count) {
        try {
            while (workers_ < count) {
                std::thread([this, number = workers_ + 1] { serve(number); }).detach();
                workers_++;
            }
        } catch (const std::system_error&) {
            return false;
        }
        return true;
    }

    void serve(int number) {
        uint64_t seen = 0;
        for (;;) {
            void (*call)(void*, int);
            void* work;
            {
                std::unique_lock<std::mutex> lock(state_);
                begin_.wait(lock, [&] { return round_ != seen; });
                seen = round_;
                if (number >= parts_) continue;
                call = call_;
                work = work_;
            }
            call(work, number);
            if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
                std::lock_guard<std::mutex> lock(state_);
                end_.notify_one();
            }
        }
    }

    std::mutex callers_, state_;
    std::condition_variable begin_, end_;
    int workers_ = 0;
    std::atomic<int> left_{0};
    void (*call_)(void*, int) = nullptr;
    void* work_ = nullptr;
    int parts_ = 0;
    uint64_t round_ = 0;
};

// Never destroyed: its threads may outlive main. A child process has none of them and begins anew.
Pool* pool = nullptr;

Pool& the_pool() {
    static bool once = [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
        return true;
    }();
    (void)once;
    return *pool;
}

const Kernels* chosen = nullptr;

// Products below which one more thread costs more than it saves: waking it takes about 10 us.
constexpr int64_t PRODUCTS_PER_THREAD = 1 << 20;

// At least one thread, where there is a part at all.
int threads_for(int64_t useful, int parts, int threads) {
    if (useful < threads) threads = static_cast<int>(useful);
    if (threads < 1) threads = 1;
    return parts < threads ? parts : threads;
}

int64_t useful_threads(int64_t products) { return products / PRODUCTS_PER_THREAD + 1; }

int64_t products_of(const AttentionJob& job) {
    int64_t pairs = 0;  // of a row and a key
    for (int i = 0; i < job.level_count; i++) {
        const Level& level = job.levels[i];
        for (int r = 0; r < level.requests; r++) {
            pairs += static_cast<int64_t>(level.rows[r + 1] - level.rows[r]) *
                     (level.keys[r + 1] - level.keys[r]);
        }
    }
    return pairs * job.kv_heads * job.group * (job.dim_qk + job.dim_vo);
}

// Few rows wait for the weights: reading one takes as long as some products.
int64_t products_of(const LinearJob& job) {
    constexpr int ROWS_PER_READ = 8;
    return static_cast<int64_t>(job.inputs) * job.outputs * (job.rows + ROWS_PER_READ);
}

}  // namespace

// What the caller's structures must look like: a library of other sources is not used.
EXPORT int64_t arbor_native_layout() {
    int64_t layout = LAYOUT_VERSION;
    for (size_t size : {sizeof(Level), sizeof(AttentionJob), sizeof(LinearJob), sizeof(NormJob),
                        sizeof(GatedJob), sizeof(StoreJob), sizeof(RotaryJob), sizeof(AddJob),
                        sizeof(HeadNormJob), sizeof(HeadSelectJob), sizeof(HeadShareJob),
                        sizeof(ChoiceJob), sizeof(LogitSumsJob), sizeof(DecodeJob), sizeof(Call)}) {
        layout = (layout * 1009 + static_cast<int64_t>(size)) % (int64_t{1} << 40);
    }
    return layout;
}

// The instruction set in use from the first call on, that of all callers: the best of this CPU, or
// the one that was named then. Its name, or null where the one named now cannot run.
EXPORT const char* arbor_native_use(const char* name) {
    for (const Kernels* kernels : FROM_BEST) {
        if ((!name || !std::strcmp(name, kernels->name)) && runs_here(*kernels)) {
            if (!chosen) chosen = kernels;
            return chosen->name;
        }
    }
    return nullptr;
}

EXPORT void arbor_native_attention(const AttentionJob* job, int32_t threads) {
    if (job->row_count < 1) return;
    int parts = chosen->attention_parts(*job);
    int used = threads_for(useful_threads(products_of(*job)), parts, threads);
    the_pool().run(used, [&](int thread) {
        for (int part = thread; part < parts; part += used) {
            chosen->attention(*job, part, &own_scratch);
        }
    });
}

EXPORT void arbor_native_linear(const LinearJob* job, int32_t threads) {
    int parts = chosen->linear_parts(*job);
    int used = threads_for(useful_threads(products_of(*job)), parts, threads);
    the_pool().run(used, [&](int thread) { chosen->linear(*job, thread, used, &own_scratch); });
}

EXPORT void arbor_native_decode(const DecodeJob* job) { chosen->decode(*job); }

EXPORT void arbor_native_norm(const NormJob* job) { chosen->norm(*job); }

EXPORT void arbor_native_gated(const GatedJob* job) { chosen->gated(*job); }

EXPORT void arbor_native_store(const StoreJob* job) { chosen->store(*job); }

EXPORT void arbor_native_rotary(const RotaryJob* job) { chosen->rotary(*job); }

EXPORT void arbor_native_select_heads(const HeadSelectJob* job) {
    chosen->select_heads(*job, &own_scratch);
}

EXPORT void arbor_native_list_moves(const HeadSelectJob* job) { chosen->list_moves(*job); }

EXPORT void arbor_native_count_held(const HeadShareJob* job) { chosen->count_held(*job); }

EXPORT void arbor_native_share_cells(const HeadShareJob* job) {
    chosen->share_cells(*job, &own_scratch);
}

EXPORT void arbor_native_list_shared(const HeadShareJob* job) {
    chosen->list_shared(*job, &own_scratch);
}

namespace {

// Does every row of a job, each by one thread.
template <class Job>
void each_row(const Job& job, void (*row_of)(const Job&, int32_t, Scratch*), int32_t threads) {
    int used = threads_for(job.rows, job.rows, threads);
    the_pool().run(used, [&](int thread) {
        for (int row = thread; row < job.rows; row += used) row_of(job, row, &own_scratch);
    });
}

}  // namespace

EXPORT void arbor_native_choose(const ChoiceJob* job, int32_t threads) {
    each_row(*job, chosen->choose, threads);
}

EXPORT void arbor_native_sum_logits(const LogitSumsJob* job, int32_t threads) {
    each_row(*job, chosen->sum_logits, threads);
}

namespace {

void norm_heads(const HeadNormJob& job) {
    int64_t bytes = job.row * (job.heads.number == BFLOAT16 ? 2 : 4);
    for (int row = 0; row < job.rows; row++) {
        NormJob heads = job.heads;
        heads.x = static_cast<const char*>(heads.x) + row * bytes;
        heads.out = static_cast<char*>(heads.out) + row * bytes;
        chosen->norm(heads);
    }
}

}  // namespace

// Jobs in their order, such as those of a decoder's layers.
EXPORT void arbor_native_run(const Call* calls, int32_t count, int32_t threads) {
    for (int i = 0; i < count; i++) {
        const void* job = calls[i].job;
        switch (calls[i].kind) {
            case Call::LINEAR:
                arbor_native_linear(static_cast<const LinearJob*>(job), threads);
                break;
            case Call::NORM: chosen->norm(*static_cast<const NormJob*>(job)); break;
            case Call::HEAD_NORM: norm_heads(*static_cast<const HeadNormJob*>(job)); break;
            case Call::ROTARY: chosen->rotary(*static_cast<const RotaryJob*>(job)); break;
            case Call::ATTENTION:
                arbor_native_attention(static_cast<const AttentionJob*>(job), threads);
                break;
            case Call::GATED: chosen->gated(*static_cast<const GatedJob*>(job)); break;
            case Call::ADD: chosen->add(*static_cast<const AddJob*>(job)); break;
        }
    }
}
