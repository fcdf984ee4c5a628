cc_test = native.cc_test
