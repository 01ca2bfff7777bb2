"""Whatever redefines a method is seen: a subclass, an object's own function, and a patch of the class itself."""

import pytest

from torchgpmc.overriding import keeps_methods, methods_of


class Density:
    def value(self):
        return 1.0


WRITTEN_OUT = methods_of(Density, ("value",))


def test_a_class_its_objects_and_subclasses_that_redefine_nothing_keep_their_methods():
    class Another(Density):
        pass

    assert all(keeps_methods(owner, WRITTEN_OUT) for owner in (Density, Density(), Another, Another()))


def test_a_subclass_that_redefines_one_does_not():
    class Another(Density):
        def value(self):
            return 2.0

    assert not keeps_methods(Another, WRITTEN_OUT) and not keeps_methods(Another(), WRITTEN_OUT)


@pytest.mark.parametrize("patch_class", [True, False])
def test_a_patched_class_or_object_does_not(monkeypatch, patch_class):
    density = Density()
    monkeypatch.setattr(Density if patch_class else density, "value", lambda *_: 2.0)
    assert not keeps_methods(density, WRITTEN_OUT)
    assert keeps_methods(Density, WRITTEN_OUT) is not patch_class
