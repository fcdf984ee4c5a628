cc_import = native.cc_import
