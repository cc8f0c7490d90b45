// A program: the operators of one step, called one after the other without a word of Python between them. And the few
// things that models leave to torch between the operators, so that a program can do them too; each gives the bits that
// torch gives.

#include "simd.h"
#include "replay.h"

namespace shoal {
namespace {

using Call = void (*)(const std::uint64_t* words);

}  // namespace
}  // namespace shoal

using namespace shoal;

extern "C" {

// steps times: | address of a shoal_replay_ function | number of argument words | the words |
void shoal_run_program(const std::uint64_t* words, i64 steps) {
    for (i64 i = 0; i < steps; i++) {
        from_word<Call>(words[0])(words + 2);
        words += 2 + words[1];
    }
}

// out = a + b; out may be neither.
void shoal_add(const float* a, const float* b, float* out, i64 count) {
    for (i64 i = 0; i < count; i++) out[i] = a[i] + b[i];
}

// out = x * factor
void shoal_scale(const float* x, float factor, float* out, i64 count) {
    for (i64 i = 0; i < count; i++) out[i] = x[i] * factor;
}

// Rows `index` of table [any, width], elements of 2 or 4 bytes, as out [count, width] of the same elements.
void shoal_take_rows(const void* table, int bytes, i64 width, const i64* index, i64 count, void* out) {
    const i64 row = width * bytes;
    for (i64 i = 0; i < count; i++)
        std::memcpy(static_cast<char*>(out) + i * row, static_cast<const char*>(table) + index[i] * row, row);
}

// bfloat16 -> float
void shoal_widen(const std::uint16_t* x, float* out, i64 count) {
    for (i64 i = 0; i < count; i++) out[i] = to_float(x[i]);
}
}

SHOAL_REPLAYABLE(add)
SHOAL_REPLAYABLE(scale)
SHOAL_REPLAYABLE(take_rows)
SHOAL_REPLAYABLE(widen)
