// Counts the instructions of some libraries, and the calls of some functions, without a hardware counter, which many
// virtual machines lack: with the trap flag set, the CPU sends SIGTRAP after each instruction, in about 6 microseconds.

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <omp.h>
#include <ucontext.h>

namespace {

constexpr int64_t MOST = 16;
struct Range {
    uint64_t begin, end;
};
Range ranges[MOST];
uint64_t functions[MOST];
int64_t range_count, function_count;
std::atomic<int64_t> instructions, calls[MOST];

void count(int, siginfo_t *, void *context) {
    uint64_t at = uint64_t(static_cast<ucontext_t *>(context)->uc_mcontext.gregs[REG_RIP]);
    auto has = [=](Range range) { return range.begin <= at && at < range.end; };
    if (std::any_of(ranges, ranges + range_count, has)) instructions++;
    for (int64_t i = 0; i < function_count; i++)
        if (functions[i] == at) calls[i]++;
}

void set_trap_flag(bool is_on) {
    uint64_t flags;
    asm volatile("pushfq\n popq %0" : "=r"(flags));
    flags = is_on ? flags | 0x100 : flags & ~uint64_t(0x100);
    asm volatile("pushq %0\n popfq" : : "r"(flags) : "cc");
}

} // namespace

extern "C" void prepare(const Range *given_ranges, int64_t of_ranges, const uint64_t *given_functions,
                        int64_t of_functions) {
    std::copy_n(given_ranges, range_count = of_ranges, ranges);
    std::copy_n(given_functions, function_count = of_functions, functions);
    struct sigaction action {};
    action.sa_sigaction = count;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGTRAP, &action, nullptr);
}

// On all threads that OpenMP has for teams of this size. Until it is off again, no thread may start or end: glibc blocks
// all signals then, and a blocked trap ends the process.
extern "C" void switch_counting(bool is_on, int threads) {
#pragma omp parallel num_threads(threads)
    set_trap_flag(is_on);
}

// Writes the number of instructions, then those of the calls, and begins at zero again.
extern "C" void take_counts(int64_t *to) {
    *to = instructions.exchange(0);
    for (int64_t i = 0; i < function_count; i++) to[i + 1] = calls[i].exchange(0);
}
