// What lets a program (program.cpp) call an operator again: SHOAL_REPLAYABLE(linear) defines shoal_replay_linear, which
// calls shoal_linear with the arguments that the recorder packed, one 64-bit word each, converted to the types of its
// declaration.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace shoal {

template <class T>
T from_word(std::uint64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(static_cast<std::uintptr_t>(word));
    } else if constexpr (std::is_floating_point_v<T>) {
        static_assert(sizeof(T) == 4, "the recorder packs floating-point arguments as float");
        const std::uint32_t low = static_cast<std::uint32_t>(word);
        T value;
        std::memcpy(&value, &low, sizeof value);
        return value;
    } else {
        return static_cast<T>(word);
    }
}

template <class... Arguments, std::size_t... I>
void call_with_words(void (*function)(Arguments...), const std::uint64_t* words, std::index_sequence<I...>) {
    function(from_word<Arguments>(words[I])...);
}

template <class... Arguments>
void call_with_words(void (*function)(Arguments...), const std::uint64_t* words) {
    call_with_words(function, words, std::index_sequence_for<Arguments...>{});
}

}  // namespace shoal

#define SHOAL_REPLAYABLE(name) \
    extern "C" void shoal_replay_##name(const std::uint64_t* words) { ::shoal::call_with_words(&shoal_##name, words); }
