// The limits of all matrix products: the rate at which this CPU multiplies bf16 from registers, and the rates at which
// it reads and writes memory.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif
#include <omp.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t ROUNDS = 2000000;
constexpr size_t HUGE_PAGE = 2 << 20;

#ifdef __AMX_BF16__
// Requests the tiles from Linux, see large_products.h.
const bool HAS_TILES = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

double multiply_tiles() {
    alignas(64) uint8_t shapes[64] = {1};
    for (int tile = 0; tile < 8; tile++) shapes[16 + 2 * tile] = 64, shapes[48 + tile] = 16;
    asm volatile("ldtilecfg (%0)" ::"r"(shapes) : "memory");
    alignas(64) uint16_t numbers[512];
    for (int i = 0; i < 512; i++) numbers[i] = uint16_t(0x3f00 + i % 128);
    _tile_loadd(4, numbers, 64);
    _tile_loadd(5, numbers, 64);
    _tile_loadd(6, numbers, 64);
    _tile_loadd(7, numbers, 64);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < ROUNDS; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return 4.0 * 2 * 16 * 16 * 32 * ROUNDS;
}
#endif

#ifdef __AVX512BF16__
double multiply_vectors() {
    __m512 sums[12];
    for (auto &one : sums) one = _mm512_set1_ps(1.0f);
    __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = (__m512bh)_mm512_set1_epi32(0x3f7f3f7f);
    for (int64_t i = 0; i < ROUNDS; i++)
#pragma GCC unroll 12
        for (auto &one : sums) {
            one = _mm512_dpbf16_ps(one, a, b);
            asm volatile("" : "+v"(one));
        }
    return 12.0 * 2 * 32 * ROUNDS;
}
#elif defined(__AVX512F__)
double multiply_vectors() {
    __m512 sums[12], a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(0.5f);
    for (auto &one : sums) one = a;
    for (int64_t i = 0; i < ROUNDS; i++)
#pragma GCC unroll 12
        for (auto &one : sums) {
            one = _mm512_fmadd_ps(a, b, one);
            asm volatile("" : "+v"(one));
        }
    return 12.0 * 2 * 16 * ROUNDS;
}
#elif defined(__FMA__)
double multiply_vectors() {
    __m256 sums[12], a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(0.5f);
    for (auto &one : sums) one = a;
    for (int64_t i = 0; i < ROUNDS; i++)
#pragma GCC unroll 12
        for (auto &one : sums) {
            one = _mm256_fmadd_ps(a, b, one);
            asm volatile("" : "+x"(one));
        }
    return 12.0 * 2 * 8 * ROUNDS;
}
#elif defined(__aarch64__)
double multiply_vectors() {
    float32x4_t sums[24]; // Four pipes with a latency of six cycles need as many.
    for (auto &one : sums) one = vdupq_n_f32(1.0f);
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    // Not 1, which GCC 12 takes for a number of 16 bits in another format.
    bfloat16x8_t a = vreinterpretq_bf16_u16(vdupq_n_u16(0x3f7f)), b = a;
    constexpr double PRODUCTS = 2 * 2 * 4; // of 2 x 4 numbers and 4 x 2 numbers
#else
    float32x4_t a = vdupq_n_f32(1.0f), b = vdupq_n_f32(0.5f);
    constexpr double PRODUCTS = 4;
#endif
    for (int64_t i = 0; i < ROUNDS; i++)
#pragma GCC unroll 24
        for (auto &one : sums) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
            one = vbfmmlaq_f32(one, a, b);
#else
            one = vfmaq_f32(one, a, b);
#endif
            asm volatile("" : "+w"(one));
        }
    return 24.0 * 2 * PRODUCTS * ROUNDS;
}
#else
double multiply_vectors() { return 0.0; }
#endif

// A cache line. The compiler splits it where the registers are shorter.
typedef uint64_t Line __attribute__((vector_size(64)));

void read_lines(const Line *lines, int64_t count) {
    Line found[4] = {};
    for (int64_t i = 0; i < count; i += 4)
        for (int k = 0; k < 4; k++) found[k] |= lines[i + k];
    // Without a use of what was read, the compiler would leave out the loop.
    Line all = found[0] | found[1] | found[2] | found[3];
    asm volatile("" : : "m"(all));
}

// Stores that leave no copy in a cache, where the CPU has them: they need not read a line before they write it.
void write_lines(Line *lines, int64_t count) {
#ifdef __AVX512F__
    for (int64_t i = 0; i < count; i++)
        _mm512_stream_si512(reinterpret_cast<__m512i *>(lines + i), _mm512_set1_epi64(i));
    _mm_sfence();
#else
    for (int64_t i = 0; i < count; i++) lines[i] = Line{} + uint64_t(i);
#endif
}

double multiply() {
#ifdef __AMX_BF16__
    if (HAS_TILES) return multiply_tiles();
#endif
    return multiply_vectors();
}

} // namespace

// Floating-point operations per second of `threads` threads: bf16 where the CPU multiplies it, else fp32. 0 if these
// instructions are not known here.
extern "C" double measure_peak(int threads) {
    double operations = 0.0, begin = omp_get_wtime();
#pragma omp parallel num_threads(threads) reduction(+ : operations)
    operations += multiply();
    return operations / (omp_get_wtime() - begin);
}

// Bytes per second that `threads` threads read (or write, if `writes` is 1) in blocks of `bytes`, each thread its part of
// a block. Blocks of `total` bytes in all, at least two, take turns, as the tensors of a step do. 0 if there is not so
// much memory. It has huge pages where Linux grants them: with small ones, finding the pages takes longer than the bytes.
extern "C" double measure_memory(int threads, int64_t bytes, int64_t total, int writes) {
    int64_t lines = bytes / int64_t(sizeof(Line)) / (4 * threads) * 4, of_block = lines * threads;
    int64_t blocks = total / bytes < 2 ? 2 : total / bytes;
    size_t size = size_t(blocks * of_block) * sizeof(Line), reserved = (size + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    Line *memory = static_cast<Line *>(std::aligned_alloc(HUGE_PAGE, reserved));
    if (!memory) return 0.0;
#ifdef MADV_HUGEPAGE
    madvise(memory, reserved, MADV_HUGEPAGE);
#endif
    auto pass = [&](bool is_writing) {
        for (int64_t i = 0; i < blocks; i++) {
#pragma omp parallel num_threads(threads)
            {
                Line *own = memory + i * of_block + omp_get_thread_num() * lines;
                is_writing ? write_lines(own, lines) : read_lines(own, lines);
            }
        }
    };
    pass(true); // The first writing of a page waits for the kernel, which clears it.
    double begin = omp_get_wtime();
    pass(writes);
    double seconds = omp_get_wtime() - begin;
    std::free(memory);
    return double(size) / seconds;
}
