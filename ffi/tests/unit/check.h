// Tests that register themselves, and checks. A check that fails prints both values and aborts.
#pragma once

#include <cstdlib>
#include <iostream>
#include <vector>

namespace jax_ep {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& AllTests() {
  static std::vector<Test> tests;
  return tests;
}

inline bool AddTest(const char* name, void (*run)()) {
  AllTests().push_back({name, run});
  return true;
}

// Runs the tests of all files of a program; the exit status.
inline int RunTests(const char* program) {
  for (const Test& test : AllTests()) {
    std::cout << test.name << std::endl;
    test.run();
  }
  std::cout << program << ": " << AllTests().size() << " tests, all passed" << std::endl;
  return AllTests().empty();
}

}  // namespace jax_ep

#define TEST(name)                                           \
  void name();                                               \
  const bool name##IsAdded = ::jax_ep::AddTest(#name, name); \
  void name()

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
