// Calls the native library for another process, which may run on another machine.
//
//     native_runner LIBRARY [SET]
//
// On the standard output: the library's layout (int64), then the length (int32) and the letters of
// the instruction set in use. Then, for every `Request` on the standard input with its regions of
// memory and the pointers between them, one call; what its regions hold afterwards is written back,
// where that was asked for. Every region ends where readable memory ends, so that the kernels cannot
// read behind it unnoticed. See native_runner.py.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

struct Request {
    int32_t call;       // number of the function in CALLS
    int32_t threads;    // 0: the function takes none
    int32_t regions;    // the first is the job
    int32_t pointers;
};

struct Region {
    int64_t bytes;
    int64_t returned;
    char* memory;
    char* mapped;
    size_t mapped_bytes;
};

struct Pointer {
    int32_t region;     // where the pointer is
    int32_t at;
    int64_t to_region;  // what it points to
    int64_t to_byte;
};

const char* const CALLS[] = {"arbor_native_attention", "arbor_native_linear", "arbor_native_norm",
                             "arbor_native_gated",     "arbor_native_store",  "arbor_native_rotary",
                             "arbor_native_select_heads", "arbor_native_list_moves",
                             "arbor_native_count_held", "arbor_native_share_cells",
                             "arbor_native_list_shared", "arbor_native_decode",
                             "arbor_native_choose", "arbor_native_sum_logits"};

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "native_runner: %s\n", what);
    std::exit(1);
}

bool read_all(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

void write_all(const void* from, size_t bytes) {
    if (std::fwrite(from, 1, bytes, stdout) != bytes) fail("nobody reads");
}

void map(Region* region) {
    size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_t bytes = static_cast<size_t>(region->bytes);
    size_t whole = (bytes + page - 1) / page * page;
    region->mapped_bytes = whole + page;
    void* at = mmap(nullptr, region->mapped_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) fail("no memory");
    region->mapped = static_cast<char*>(at);
    if (mprotect(region->mapped + whole, page, PROT_NONE)) fail("a page cannot be closed");
    region->memory = region->mapped + whole - bytes;
}

void* symbol(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found) fail(dlerror());
    return found;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 2) fail("which library?");
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fail(dlerror());
    auto layout = reinterpret_cast<int64_t (*)()>(symbol(library, "arbor_native_layout"));
    auto use = reinterpret_cast<const char* (*)(const char*)>(symbol(library, "arbor_native_use"));
    const char* name = use(count > 2 ? arguments[2] : nullptr);
    if (!name) fail("the CPU cannot run that instruction set");
    int64_t number = layout();
    int32_t letters = static_cast<int32_t>(std::strlen(name));
    write_all(&number, 8);
    write_all(&letters, 4);
    write_all(name, static_cast<size_t>(letters));
    std::fflush(stdout);

    Request request;
    while (read_all(&request, sizeof request)) {
        std::vector<Region> regions(static_cast<size_t>(request.regions));
        for (Region& region : regions) {
            if (!read_all(&region, 16)) fail("a region is missing");
            map(&region);
            if (!read_all(region.memory, static_cast<size_t>(region.bytes))) fail("bytes are missing");
        }
        for (int i = 0; i < request.pointers; i++) {
            Pointer pointer;
            if (!read_all(&pointer, sizeof pointer)) fail("a pointer is missing");
            const Region& to = regions.at(static_cast<size_t>(pointer.to_region));
            char* address = to.memory + pointer.to_byte;
            std::memcpy(regions.at(static_cast<size_t>(pointer.region)).memory + pointer.at, &address, 8);
        }
        void* function = symbol(library, CALLS[request.call]);
        if (request.threads) {
            reinterpret_cast<void (*)(void*, int32_t)>(function)(regions[0].memory, request.threads);
        } else {
            reinterpret_cast<void (*)(void*)>(function)(regions[0].memory);
        }
        for (Region& region : regions) {
            if (region.returned) write_all(region.memory, static_cast<size_t>(region.bytes));
            munmap(region.mapped, region.mapped_bytes);
        }
        std::fflush(stdout);
    }
    return 0;
}
