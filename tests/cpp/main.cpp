// The unit tests' main function. Tests lie in the other files here: doctest finds them by itself.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "support.hpp"

std::string torch_iroh::testing::g_program;

int main(int argc, char** argv) {
  torch_iroh::testing::g_program = argv[0];
  return doctest::Context(argc, argv).run();
}
