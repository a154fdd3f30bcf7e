// The unit tests' main function. Tests lie in the other files here: doctest finds them by itself.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
