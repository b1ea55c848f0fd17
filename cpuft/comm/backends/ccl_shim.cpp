// Plain C functions around oneCCL's C++ interface, for ctypes. There are no torch headers, so that one build works with
// every version of torch. Every call blocks until its collective is done, and returns 0, or 1 after cpuft_ccl_error() is
// set.

// C++ headers of glibc 2.32 and newer refer to a variable that older systems do not have. With one of our own, which is
// always 0 (there may be several threads), a shim that is compiled on a new system loads on an older one.
#define __libc_single_threaded cpuft_single_threaded
extern "C" {
__attribute__((visibility("hidden"))) extern char cpuft_single_threaded;
}

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <sys/prctl.h>

#include "oneapi/ccl.hpp"

char cpuft_single_threaded = 0;

namespace {

thread_local std::string last_error;

// oneCCL without workers of its own must not be called from two threads at once.
std::mutex library;

struct Group {
    std::shared_ptr<ccl::kvs> store;
    std::unique_ptr<ccl::communicator> communicator;
};

template <class Body>
int guarded(Body body) {
    try {
        body();
        return 0;
    } catch (const std::exception& error) {
        last_error = error.what();
    } catch (...) {
        last_error = "unknown exception";
    }
    return 1;
}

// Waits for a collective. oneCCL's worker thread moves the data, and may share a core with the waiting thread. So the
// waiting thread sleeps between two tests, for an eighth of the time that it has waited already (Linux adds 50 us); a
// long collective is then tested less often. It does not call sched_yield: if two jobs spin on that, Linux 6.18 runs
// nothing else for up to a minute, neither the ranks that they wait for nor the kernel's own threads.
template <class Submit>
int blocking(Submit submit) {
    return guarded([&] {
        using clock = std::chrono::steady_clock;
        constexpr clock::duration least = std::chrono::microseconds(10), most = std::chrono::milliseconds(1);
        std::unique_lock<std::mutex> lock(library);
        const auto begun = clock::now();
        auto event = submit();
        while (!event.test()) {
            lock.unlock();
            std::this_thread::sleep_for(std::clamp<clock::duration>((clock::now() - begun) / 8, least, most));
            lock.lock();
        }
    });
}

// Sets how late sleeps of this thread may end (prctl(2)). Threads that are started meanwhile inherit the value.
class Slack {
public:
    explicit Slack(unsigned long microseconds) : before(prctl(PR_GET_TIMERSLACK)) {
        if (microseconds) prctl(PR_SET_TIMERSLACK, microseconds * 1000);
    }
    ~Slack() { prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(before)); }

private:
    int before;
};

const ccl::communicator& of(void* group) {
    return *static_cast<Group*>(group)->communicator;
}

}  // namespace

extern "C" {

const char* cpuft_ccl_error() {
    return last_error.c_str();
}

int cpuft_ccl_version(char* text, size_t size) {
    return guarded([&] {
        std::strncpy(text, ccl::get_library_version().full, size - 1);
        text[size - 1] = 0;
    });
}

size_t cpuft_ccl_address_size() {
    return ccl::kvs::address_max_size;
}

// The first rank makes the address to which the others connect; `address` has cpuft_ccl_address_size() bytes. A worker
// that shares its core polls for work and sleeps in between. Each time it wakes up, it takes the core from computing.
// So `slack` makes these sleeps longer, in microseconds (0: unchanged).
int cpuft_ccl_make_group(void** group, char* address, int first, unsigned long slack) {
    return guarded([&] {
        std::lock_guard<std::mutex> lock(library);
        Slack inherited(slack);
        ccl::init();
        auto made = std::make_unique<Group>();
        ccl::kvs::address_type raw;
        if (first) {
            made->store = ccl::create_main_kvs();
            raw = made->store->get_address();
            std::copy(raw.begin(), raw.end(), address);
        } else {
            std::copy(address, address + raw.size(), raw.begin());
            made->store = ccl::create_kvs(raw);
        }
        *group = made.release();
    });
}

int cpuft_ccl_connect(void* group, int size, int rank, unsigned long slack) {
    return guarded([&] {
        std::lock_guard<std::mutex> lock(library);
        Slack inherited(slack);
        auto* made = static_cast<Group*>(group);
        made->communicator =
            std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, made->store));
    });
}

int cpuft_ccl_all_reduce(void* group, void* data, size_t count, int type, int reduction) {
    return blocking([&] {
        return ccl::allreduce(data, data, count, static_cast<ccl::datatype>(type),
                              static_cast<ccl::reduction>(reduction), of(group));
    });
}

int cpuft_ccl_reduce_scatter(void* group, const void* source, void* target, size_t count, int type, int reduction) {
    return blocking([&] {
        return ccl::reduce_scatter(source, target, count, static_cast<ccl::datatype>(type),
                                   static_cast<ccl::reduction>(reduction), of(group));
    });
}

int cpuft_ccl_broadcast(void* group, void* data, size_t bytes, int root) {
    return blocking([&] { return ccl::broadcast(data, bytes, ccl::datatype::uint8, root, of(group)); });
}

int cpuft_ccl_all_gather(void* group, const void* source, void* target, size_t bytes) {
    return blocking([&] { return ccl::allgather(source, target, bytes, ccl::datatype::uint8, of(group)); });
}

int cpuft_ccl_all_to_all(void* group, const void* source, const size_t* source_bytes, void* target,
                         const size_t* target_bytes, int size) {
    std::vector<size_t> sent(source_bytes, source_bytes + size), received(target_bytes, target_bytes + size);
    return blocking(
        [&] { return ccl::alltoallv(source, sent, target, received, ccl::datatype::uint8, of(group)); });
}

int cpuft_ccl_send(void* group, void* data, size_t bytes, int peer) {
    return blocking([&] { return ccl::send(data, bytes, ccl::datatype::uint8, peer, of(group)); });
}

int cpuft_ccl_recv(void* group, void* data, size_t bytes, int peer) {
    return blocking([&] { return ccl::recv(data, bytes, ccl::datatype::uint8, peer, of(group)); });
}

}  // extern "C"
