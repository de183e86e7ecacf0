// Checks for test programs. A check that fails prints both values and aborts.
#pragma once

#include <cstdlib>
#include <iostream>

#define CHECK_EQ(got, expected)                                                                  \
  do {                                                                                           \
    const auto got_value = (got);                                                                \
    const auto expected_value = (expected);                                                      \
    if (!(got_value == expected_value)) {                                                        \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " #got " is " << got_value << ", expected " \
                << expected_value << std::endl;                                                  \
      std::abort();                                                                              \
    }                                                                                            \
  } while (false)

#define CHECK_CONTAINS(text, part)                                                             \
  do {                                                                                         \
    const std::string text_value = (text);                                                     \
    if (text_value.find(part) == std::string::npos) {                                          \
      std::cerr << __FILE__ << ":" << __LINE__ << ": '" << text_value << "' lacks '" << (part) \
                << "'" << std::endl;                                                           \
      std::abort();                                                                            \
    }                                                                                          \
  } while (false)
