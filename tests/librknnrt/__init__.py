"""A double of Rockchip's librknnrt.so for tests."""
